"""`k3 simulate` by its exit status and its one JSON object a case."""

import json
from pathlib import Path

import pytest

from k3ctl.main import main

_STEPS = [
    {"submit": "r1", "prompt": [["a", 0, 40]], "output": [["o", 0, 2]]},
    {"run": ["r1"]},
]


def _run(folder: Path, document: object) -> int:
    path = folder / "case.json"
    path.write_text(json.dumps(document))
    return main(["simulate", "--scenario", str(path)])


def test_a_case_that_holds_exits_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect = {"expect": {"r1": {"hit": 0, "forwards": [40]}, "pool": {"leaked": 0}}}
    assert _run(tmp_path, {"name": "one", "steps": [*_STEPS, expect]}) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["name"], result["ok"], result["r1"]["computed"]) == ("one", True, 40)


def test_a_failed_expectation_exits_non_zero_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, {"steps": [*_STEPS, {"expect": {"r1": {"hit": {"min": 1}}}}]}) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert "r1.hit" in captured.err


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"steps": [], "colour": 1}, "colour"),
        ({"steps": [], "config": {"units": 2}}, "units"),
        ({"steps": [{"submit": "r", "prompt": [], "priority": 1}]}, "priority"),
        ({"steps": [{"jump": 1}]}, "jump"),
        ({"steps": [{"evict": {"rows": 1}}]}, "rows"),
        ({"steps": [{"lookup": {"as": "q", "prompt": [], "depth": 1}}]}, "depth"),
        ({"steps": [{"transfer": {"shut": "r"}}]}, "shut"),
        ({"steps": [], "config": {"retention": ["forever"]}}, "forever"),
        ({"steps": [], "config": {"retention": [{"every": 3}]}}, "every"),
        ({"steps": [{"submit": "r", "prompt": [{"image": "a", "size": 3}]}]}, "size"),
        ({"steps": [{"submit": "r", "prompt": [], "times": 2}]}, "#"),
        ({"steps": [{"submit": "r#", "prompt": [], "times": 0}]}, "times"),
        ({"steps": [{"begin": -1}]}, "begin"),
        ({"steps": [], "config": {"namespace": "tp 8"}}, "namespace"),
        ({"steps": [], "refused": "24"}, "refused"),
        ({"steps": [], "refused": []}, "refused"),
        ({"steps": [{"step": 1}], "refused": ["24"]}, "refused"),
        ({"steps": [{**_STEPS[0], "max_new": "two"}]}, "max_new"),
        ({"steps": [{**_STEPS[0], "accepted": [1, -1]}]}, "accepted"),
        ({"steps": [{**_STEPS[0], "accepted": 3}]}, "accepted"),
        ({"steps": [{**_STEPS[0], "submit": "pool"}]}, "pool"),
        ({"steps": [{"lookup": {"as": "pool", "prompt": []}}]}, "pool"),
        ({"steps": [*_STEPS, {"expect": {"r1": {"hit": {"min": "x"}}}}]}, "min"),
        ({"steps": [*_STEPS, {"expect": {"r1": {"hit": {"in": 0}}}}]}, "in takes a list"),
        ({"steps": [{"submit": "r", "prompt": [["a", 0, 10**14]]}]}, "larger than this machine"),
    ],
)
def test_an_unknown_key_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: object, named: str
) -> None:
    assert _run(tmp_path, document) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"[" * 100_000, b'[{"steps": '])
def test_a_file_that_is_no_json_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(content)
    assert main(["simulate", "--scenario", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_an_unknown_result_is_a_failed_expectation(tmp_path: Path) -> None:
    assert _run(tmp_path, {"steps": [*_STEPS, {"expect": {"r1": {"hits": 0}}}]}) == 1


def test_a_retention_off_the_grid_names_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"unit": 16, "page_units": 1, "retention": [{"interval": 24}]}
    assert _run(tmp_path, {"config": config, "steps": []}) == 2
    error = capsys.readouterr().err
    assert "24" in error
    assert "16" in error


@pytest.mark.parametrize(
    ("interval", "words", "status"),
    [(24, ["24", "16"], 0), (24, ["24", "4"], 1), (32, ["32"], 1)],
)
def test_a_case_may_demand_that_its_configuration_is_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    interval: int,
    words: list[str],
    status: int,
) -> None:
    config = {"unit": 16, "page_units": 1, "retention": [{"interval": interval}]}
    assert _run(tmp_path, {"config": config, "refused": words, "steps": []}) == status
    assert json.loads(capsys.readouterr().out)["ok"] is (status == 0)


def test_a_trace_is_replayed_and_told_as_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 9, "input_length": 1700, "output_length": 5, "hash_ids": [0, 1, 2, 4]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["simulate", "--trace", str(path), "--format", "mooncake"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["input_tokens"], report["hit_tokens"]) == (2, 3300, 1536)
    assert main(["simulate", "--trace", str(path), "--unit", "100"]) == 2


@pytest.mark.parametrize(
    ("flags", "hit_tokens"),
    [
        ([], 256),
        (["--drop-match", "writer"], 256),
        (["--draft", "no_drop"], 256),
        (["--draft", "drop"], 192),
    ],
)
def test_only_a_drafter_that_drops_asks_how_a_writer_went_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], hit_tokens: int
) -> None:
    path = tmp_path / "session.json"
    # Four units of 64 are shared; the first goes on in a fifth that the second does not have.
    first = {"in": 330, "out": 5, "hash_ids": [1, 2, 3, 4, 5]}
    second = {"in": 400, "out": 5, "hash_ids": [1, 2, 3, 4, 6, 7]}
    session = {"id": "s", "block_size": 64, "requests": [first, second]}
    path.write_text(json.dumps(session))
    words = ["--format", "agent-sessions", "--unit", "64", "--retention", "dense"]
    assert main(["simulate", "--trace", str(path), *words, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == hit_tokens


@pytest.mark.parametrize("retention", ["none", "dense", "prompt_end,interval:1024", '["unit_end"]'])
def test_retention_can_be_given_as_words_or_as_a_scenarios_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], retention: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp":0,"input_length":1600,"output_length":5,"hash_ids":[0,1,2,3]}\n')
    assert main(["simulate", "--trace", str(path), "--retention", retention]) == 0
    written = json.loads(capsys.readouterr().out)["states_written"]
    assert written == {"none": 0, "dense": 3, '["unit_end"]': 1}.get(retention, 2)


_BLOCK = '{"timestamp":0,"input_length":1600,"output_length":5,"hash_ids":[0,1,2,3]}\n'


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--limit", "-2"], "--limit"),
        (["--memory-gib", "-3"], "--memory-gib"),
        (["--memory-gib", "4", "--pages", "9"], "--pages"),
        (["--page-units", "0"], "--page-units"),
        (["--chunk-tokens", "0"], "--chunk-tokens"),
        (["--tp", "4"], "--config"),
        (["--config", "no-such-folder"], "no-such-folder"),
        (["--retention", "[}"], "--retention"),
        (["--retention", "interval:x"], "'x'"),
        (["--draft", "replay", "--replay-tokens", "0"], "replay_tokens"),
        (["--format", "agent-sessions"], "agent-sessions"),
        (["--plot", "no-such-folder/hits.png"], "no-such-folder"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(_BLOCK)
    assert main(["simulate", "--trace", str(path), *flags]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("sizes", ["", "4,x", "0", "-1,4", "inf"])
def test_capacities_of_a_plot_are_read_before_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.jsonl"
    path.write_text(_BLOCK)
    plot = ["--plot", str(tmp_path / "hits.png"), f"--plot-gib={sizes}"]
    assert main(["simulate", "--trace", str(path), *plot]) == 2
    captured = capsys.readouterr()
    assert "--plot-gib" in captured.err
    assert captured.out == ""


def test_a_plot_has_a_line_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "trace.jsonl", tmp_path / "hits.svg"
    path.write_text(_BLOCK * 2)
    plot = ["--plot", str(picture), "--plot-gib", "4,16"]
    assert main(["simulate", "--trace", str(path), *plot]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    policies = {row["policy"] for row in rows}
    assert len(policies) >= 4
    assert len(rows) == 2 * len(policies)
    assert "<svg" in picture.read_text()


def test_wider_rows_leave_room_for_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(_BLOCK)
    row_bytes: list[int] = []
    for dtype in ("fp8", "bfloat16", "float32"):
        assert main(["simulate", "--trace", str(path), "--row-dtype", dtype]) == 0
        row_bytes.append(json.loads(capsys.readouterr().out)["bytes"]["rows_resident_max"])
    assert row_bytes == [row_bytes[0], 2 * row_bytes[0], 4 * row_bytes[0]]


def test_requests_that_never_fit_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(_BLOCK)
    assert main(["simulate", "--trace", str(path), "--memory-gib", "0.001"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["refused"] == 1
    assert "1 of 1 requests do not fit" in captured.err


@pytest.mark.parametrize("name", ["gone.jsonl", "empty"])
def test_a_trace_that_is_not_there_or_empty_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["simulate", "--trace", str(tmp_path / name)]) == 2
    assert "no " in capsys.readouterr().err


def test_nothing_to_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "--scenario" in capsys.readouterr().err
