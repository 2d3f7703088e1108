"""Drawn scenes: one to four coloured shapes on a plain ground, with the truth beside the file.

A scene is laid out at the scale at which the model will see it (after the resize), then drawn at
the picture's own size, so that every picture size asks for the same eyesight.
"""

import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from train_nano.talk import Picture

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 215),
    "purple": (130, 45, 160),
    "black": (20, 20, 22),
}
SHAPES = ("circle", "square", "triangle", "star")
CLASSES = [(colour, shape) for colour in COLOURS for shape in SHAPES]
GROUNDS = ((255, 255, 255), (240, 240, 240), (225, 232, 240), (250, 240, 225), (205, 205, 205))
RADIUS = (10.0, 17.0)
"""Half the size of an object, pixels as the model sees them."""

MIN_GAP_X = 20.0
"""Pixels as the model sees them between the centres of two objects, left to right."""


NUM_COLUMNS = 10
"""Places from left to right that are told apart, one digit each."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One object; x, y and radius in pixels as the model sees them."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's contents.

    Attributes:
        width: of the picture's file, pixels.
        height: likewise.
        scale: pixels of the file for one that the model sees.
        things: in reading order, as the model meets the vision tokens of their centres.
    """

    width: int
    height: int
    scale: float
    things: tuple[Thing, ...]

    def column(self, thing: Thing) -> int:
        """Where an object's centre stands from left to right, in tenths of the width."""
        return column_of(thing.x * self.scale / self.width)


def column_of(share: float) -> int:
    """The column of a place given as a share of the width."""
    return min(NUM_COLUMNS - 1, int(NUM_COLUMNS * share))


def random_scene(
    draw: random.Random, config: ProcessorConfig, num_things: int | None = None
) -> Scene:
    """Lays out a scene whose objects do not touch and stand apart from left to right.

    Args:
        draw: where chance comes from.
        config: how pictures are resized.
        num_things: 1 to 4; by chance if None.
    """
    while True:
        width, height = _random_size(draw)
        geometry = plan(width, height, config)
        count = num_things or draw.choice((1, 2, 2, 3, 3, 4, 4))
        classes = draw.sample(CLASSES, count)
        # Half of the scenes share colours or shapes, so that counting has something to count.
        if draw.random() < 0.5:
            classes = _with_repeats(draw, count)
        unit = config.patch_size * config.merge_size
        placed = _place(draw, geometry.width, geometry.height, unit, classes)
        if placed is not None:
            return Scene(width, height, width / geometry.width, placed)


def picture(scene: Scene, draw: random.Random) -> Picture:
    """Draws a scene and encodes it in one of the usual formats."""
    image = render(scene, draw)
    buffer = io.BytesIO()
    kind = draw.choice(("PNG", "PNG", "JPEG", "WEBP"))
    if kind == "PNG":
        image.save(buffer, "PNG", compress_level=1)
    else:
        image.save(buffer, kind, quality=draw.randint(70, 95))
    objects = tuple(
        (
            CLASSES.index((thing.colour, thing.shape)),
            thing.x * scene.scale / scene.width,
            thing.y * scene.scale / scene.height,
        )
        for thing in scene.things
    )
    return Picture(buffer.getvalue(), objects)


def render(scene: Scene, draw: random.Random) -> Image.Image:
    """Draws a scene; edges are smooth because it is drawn twice as large."""
    over = 2 if scene.width * scene.height < 200_000 else 1
    size = (scene.width * over, scene.height * over)
    ground = tuple(min(255, max(0, v + draw.randint(-8, 8))) for v in draw.choice(GROUNDS))
    image = Image.new("RGB", size, ground)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        paint = tuple(min(255, max(0, v + draw.randint(-18, 18))) for v in COLOURS[thing.colour])
        factor = scene.scale * over
        _draw_shape(pen, thing, factor, paint, draw.uniform(-0.2, 0.2))
    return image if over == 1 else image.resize((scene.width, scene.height), Image.Resampling.BOX)


def _random_size(draw: random.Random) -> tuple[int, int]:
    side = draw.choice((112, 112, 112, 120, 128, 160, 200, 224, 256, 320, 400, 512))
    stretch = draw.choice((1.0, 1.0, 1.0, 1.33, 1.5, 0.75, 0.67))
    return max(84, int(side * math.sqrt(stretch))), max(84, int(side / math.sqrt(stretch)))


def _with_repeats(draw: random.Random, count: int) -> list[tuple[str, str]]:
    colours = draw.sample(list(COLOURS), 2)
    shapes = draw.sample(SHAPES, 2)
    options = [(c, s) for c in colours for s in draw.sample(SHAPES, 3)]
    options += [(c, s) for c in draw.sample(list(COLOURS), 4) for s in shapes]
    return draw.sample(sorted(set(options)), count)


def _place(
    draw: random.Random, width: int, height: int, unit: int, classes: list[tuple[str, str]]
) -> tuple[Thing, ...] | None:
    """Objects in reading order: line by line of the vision tokens, each `unit` pixels wide."""
    things: list[Thing] = []
    for colour, shape in classes:
        for _ in range(30):
            radius = draw.uniform(*RADIUS)
            edge = radius + 1
            if min(width, height) <= 2 * edge:
                return None
            x, y = draw.uniform(edge, width - edge), draw.uniform(edge, height - edge)
            cell = (y // unit, x // unit)
            is_alone = all((other.y // unit, other.x // unit) != cell for other in things)
            if is_alone and all(_is_apart(x, y, radius, other) for other in things):
                things.append(Thing(colour, shape, x, y, radius))
                break
        else:
            return None
    return tuple(sorted(things, key=lambda thing: (thing.y // unit, thing.x // unit)))


def _is_apart(x: float, y: float, radius: float, other: Thing) -> bool:
    distance = math.hypot(x - other.x, y - other.y)
    return abs(x - other.x) >= MIN_GAP_X and distance >= 1.1 * (radius + other.radius)


def _draw_shape(
    pen: ImageDraw.ImageDraw, thing: Thing, factor: float, paint: tuple[int, ...], turn: float
) -> None:
    x, y, r = thing.x * factor, thing.y * factor, thing.radius * factor
    match thing.shape:
        case "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=paint)
        case "square":
            pen.polygon(_corners(x, y, r, 4, turn + math.pi / 4), fill=paint)
        case "triangle":
            pen.polygon(_corners(x, y, r, 3, turn - math.pi / 2), fill=paint)
        case _:
            pen.polygon(_star(x, y, r, turn - math.pi / 2), fill=paint)


def _corners(x: float, y: float, r: float, count: int, turn: float) -> list[tuple[float, float]]:
    angles = (turn + 2 * math.pi * index / count for index in range(count))
    return [(x + r * math.cos(a), y + r * math.sin(a)) for a in angles]


def _star(x: float, y: float, r: float, turn: float) -> list[tuple[float, float]]:
    outer, inner = _corners(x, y, r, 5, turn), _corners(x, y, 0.4 * r, 5, turn + math.pi / 5)
    return [corner for pair in zip(outer, inner, strict=True) for corner in pair]
