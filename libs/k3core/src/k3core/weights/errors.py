"""What can be wrong with a checkpoint's files; each error names the tensor or the file."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is."""


class MissingTensorError(CheckpointError):
    """Tensors that the model needs and no file holds."""


class UnexpectedTensorError(CheckpointError):
    """Tensors that the model has no place for."""


class MisshapenTensorError(CheckpointError):
    """A tensor whose shape or dtype is not what the config asks for."""
