import subprocess
import sys
from pathlib import Path

import pytest

from k3_prefill.main import build_engine
from k3_prefill.settings import PrefillSettings
from k3core.engine.script import ScriptError
from k3text.vocabulary import write_vocabulary


def test_neither_worker_loads_torch_before_it_needs_a_model() -> None:
    code = "import sys, k3_prefill.main, k3_decode.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_scripted_engine_needs_a_vocabulary_and_a_script(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, 300)
    script = tmp_path / "script.jsonl"
    settings = PrefillSettings(engine="scripted", checkpoint=str(tmp_path), script=str(script))
    with pytest.raises(ScriptError):
        build_engine(settings)
    script.write_text('{"match": "", "text": "hello"}')
    parts = build_engine(settings)
    assert parts.model_fingerprint.startswith("script-")
    assert not parts.embedding_row_bytes
