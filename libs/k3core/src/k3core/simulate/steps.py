"""The verbs of a scenario: each takes a runner and its own value, and does one thing."""

import re
from collections.abc import Callable, Mapping
from typing import cast

from k3core.cache.host_tier import HostEntry
from k3core.cache.path_pin import pin_path, unpin_path
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheError
from k3core.simulate.expectations import failures
from k3core.simulate.results import results, universal_failures
from k3core.simulate.scenario import ScenarioRunner
from k3core.simulate.scenario_file import (
    Case,
    Json,
    ScenarioError,
    Step,
    keys_known,
    segments,
    whole,
)

_IDENTITY_KEYS = {"salt", "adapter"}


def run_case(case: Case, is_audited: bool = True) -> dict[str, Json]:
    """Run one case to its end.

    Returns:
        `name`, `ok`, `failures` and all results, ready for JSON.

    Raises:
        ScenarioError: if a step cannot be understood.
    """
    if case.refused:
        return _run_refused(case)
    runner = ScenarioRunner(case, is_audited)
    for number, step in enumerate(case.steps):
        known = len(runner.failures)
        _VERBS[step.verb](runner, step)
        for place in range(known, len(runner.failures)):
            runner.failures[place] = f"step {number}: {runner.failures[place]}"
    while runner.flying:
        runner.end_step()
    runner.failures += [f"at the end: {fault}" for fault in universal_failures(runner)]
    return {
        "name": case.name,
        "ok": not runner.failures,
        "failures": runner.failures,
        **results(runner),
    }


def _run_refused(case: Case) -> dict[str, Json]:
    """A case whose configuration no cache may start with, for a reason that names what it must."""
    try:
        ScenarioRunner(case)
    except CacheError as error:
        reason = str(error)
        named = re.findall(r"\w+", reason)
        faults = [
            f"the refusal does not name {each}: {reason}"
            for each in case.refused
            if each not in named
        ]
    else:
        reason, faults = None, ["the configuration was not refused"]
    return {"name": case.name, "ok": not faults, "failures": faults, "refusal": reason}


def _submit(runner: ScenarioRunner, step: Step) -> None:
    name, options = str(step.value), dict(step.options)
    if "times" not in options:
        runner.submit(name, options)
        return
    times = whole(options.pop("times"), f"submit {name}: times", 1)
    if "#" not in name:
        raise ScenarioError(f"submit {name}: with times, the name needs a # for the number")
    for number in range(times):
        runner.submit(_numbered(name, number), _numbered(options, number))


def _numbered(value: Json, number: int) -> Json:
    """The value with the number in place of each # of its texts."""
    if isinstance(value, str):
        return value.replace("#", str(number))
    if isinstance(value, list):
        return [_numbered(each, number) for each in cast("list[Json]", value)]
    if isinstance(value, dict):
        return {
            key: _numbered(each, number) for key, each in cast("dict[str, Json]", value).items()
        }
    return value


def _step(runner: ScenarioRunner, step: Step) -> None:
    for _ in range(whole(step.value, "step")):
        if not runner.step():
            return


def _begin(runner: ScenarioRunner, step: Step) -> None:
    for _ in range(whole(step.value, "begin")):
        runner.begin_step()


def _commit(runner: ScenarioRunner, step: Step) -> None:
    for _ in range(min(whole(step.value, "commit"), len(runner.flying))):
        runner.end_step()


def _run(runner: ScenarioRunner, step: Step) -> None:
    runner.run(_names(runner, step.value, "run"))


def _finish(runner: ScenarioRunner, step: Step) -> None:
    for name in _names(runner, step.value, "finish"):
        runner.end(name)


def _abort(runner: ScenarioRunner, step: Step) -> None:
    for name in _names(runner, step.value, "abort"):
        runner.abort(name)


def _preempt(runner: ScenarioRunner, step: Step) -> None:
    for name in _names(runner, step.value, "preempt"):
        runner.preempt(name)


def _release(runner: ScenarioRunner, step: Step) -> None:
    for name in _names(runner, step.value, "release"):
        runner.scheduler.let_go(name)


def _evict(runner: ScenarioRunner, step: Step) -> None:
    found = keys_known(step.value, {"pages", "states", "state"}, "evict")
    if "state" in found:
        _evict_state(runner, found["state"])
    if "states" in found:
        for _ in range(whole(found["states"], "evict states")):
            runner.cache.evictor.evict_oldest_state()
    if "pages" in found:
        _evict_pages(runner, found["pages"])
    runner.forget_gone()
    runner.check()


def _evict_state(runner: ScenarioRunner, value: Json) -> None:
    if isinstance(value, list):
        items = cast("list[Json]", value)
        if len(items) != 2:
            raise ScenarioError(f"evict state: [path, position] is wanted, not {value!r}")
        path, position = items
        options: dict[str, Json] = {}
    else:
        options = keys_known(value, {"path", "position", *_IDENTITY_KEYS}, "evict state")
        path, position = options.get("path"), options.get("position")
    sequence = _path(runner, path, options, "evict state")
    cache, unit = runner.cache, runner.case.cache.unit_tokens
    place = whole(position, "evict state: position", 1) // unit
    digest = sequence.digests[place - 1] if 0 < place <= len(sequence.digests) else b""
    checkpoint = cache.states.sealed.get(digest)
    if checkpoint is not None and checkpoint.position == position and not checkpoint.pins:
        cache.evictor.evict_state(checkpoint)


def _evict_pages(runner: ScenarioRunner, value: Json) -> None:
    cache = runner.cache
    if not isinstance(value, dict):
        wanted = cache.pool.free_rows() + whole(value, "evict pages")
        while cache.pool.free_rows() < wanted and cache.evictor.evict_oldest_leaf():
            pass
        return
    options = keys_known(value, {"path", "from", "to", *_IDENTITY_KEYS}, "evict pages")
    sequence = _path(runner, options.get("path"), options, "evict pages")
    unit = runner.case.cache.unit_tokens
    first = whole(options.get("from", 0), "evict pages: from") // unit
    matched = cache.paged.match(sequence.digests)
    if first >= matched:
        return
    # Rows below the range go as well: an index without their parents could not reach them.
    for each in cache.paged.subtree(cache.paged.index[sequence.digests[first]]):
        if not cache.paged.refs[each] and not cache.paged.children[each]:
            cache.evictor.evict_unit(each)


def _lookup(runner: ScenarioRunner, step: Step) -> None:
    options = keys_known(step.value, {"as", "prompt", *_IDENTITY_KEYS}, "lookup")
    if "as" not in options:
        raise ScenarioError("lookup: 'as' names the result")
    if options["as"] == "pool":
        raise ScenarioError("lookup: this is what the pool's own results are called")
    runner.lookups[str(options["as"])] = runner.look_up(options)


def _remote(runner: ScenarioRunner, step: Step) -> None:
    options = keys_known(step.value, {"put", "lose", "fail_next_load", "ack"}, "remote")
    if isinstance(options.get("fail_next_load"), dict):
        found = _remote_entries(runner, options["fail_next_load"], "remote fail_next_load")
        runner.unreadable |= {entry.host for entry in found}
    elif options.get("fail_next_load"):
        runner.is_next_load_lost = True
    if "put" in options:
        _remote_put(runner, options["put"])
    if "lose" in options:
        _remote_lose(runner, options["lose"])
    # An acknowledgement lets go of nothing here: a put is a copy that is done at once.


def _remote_range(
    runner: ScenarioRunner, value: Json, where: str
) -> tuple[list[bytes], int, int, Json]:
    """Digests of a path, the units first..last - 1 that are meant, and a position if one is named."""
    known = {"path", "from", "to", "position", "rank", "group", *_IDENTITY_KEYS}
    options = keys_known(value, known, where) if isinstance(value, dict) else {"path": value}
    digests = _path(runner, options.get("path"), options, where).digests
    unit = runner.case.cache.unit_tokens
    first = whole(options.get("from", 0), f"{where}: from") // unit
    last = whole(options.get("to", len(digests) * unit), f"{where}: to") // unit
    return digests, first, last, options.get("position")


def _remote_put(runner: ScenarioRunner, value: Json) -> None:
    """Copy what is cached of a path to the remote tier: rows, and states (or one of them)."""
    cache = runner.cache
    assert cache.tier is not None
    digests, first, last, position = _remote_range(runner, value, "remote put")
    unit, size = runner.case.cache.unit_tokens, runner.case.cache.page_units
    for place in range(first, min(last, len(digests))):
        digest, end = digests[place], (place + 1) * unit
        found = cache.paged.index.get(digest)
        entry = cache.tier.admit("unit", digest, end) if found is not None else None
        if found is not None and entry is not None:
            where = cache.pool.place(found // size) * size + found % size
            runner.device.keep(entry.host, where, -1)
        checkpoint = cache.states.sealed.get(digest)
        if checkpoint is not None and position in (None, end):
            entry = cache.tier.admit("state", digest, end)
            if entry is not None:
                runner.device.keep(entry.host, -1, cache.pool.place(checkpoint.pages[0]))


def _remote_lose(runner: ScenarioRunner, value: Json) -> None:
    """Objects of a path vanish from the remote tier: all, a range of rows, or one state.

    A position of which one rank or one group is gone is gone: it is never offered in part.
    """
    tier = runner.cache.tier
    assert tier is not None
    tier.lose(_remote_entries(runner, value, "remote lose"))


def _remote_entries(runner: ScenarioRunner, value: Json, where: str) -> list[HostEntry]:
    """Objects of a path in the remote tier: all, those in a range of rows, or one state."""
    tier = runner.cache.tier
    assert tier is not None
    digests, first, last, position = _remote_range(runner, value, where)
    unit = runner.case.cache.unit_tokens
    found: list[HostEntry] = []
    for place in range(first, min(last, len(digests))):
        tables = (tier.units, tier.states) if position is None else (tier.states,)
        if position in (None, (place + 1) * unit):
            found += [table[digests[place]] for table in tables if digests[place] in table]
    return found


def _transfer(runner: ScenarioRunner, step: Step) -> None:
    options = keys_known(step.value, {"open", "close"}, "transfer")
    for name in _names(runner, options.get("open", []), "transfer open"):
        if name in runner.transfers:
            raise ScenarioError(f"transfer: one of {name} is open already")
        runner.transfers[name] = pin_path(runner.cache, runner.tracks[name].sequence)
    for name in _names(runner, options.get("close", []), "transfer close"):
        pin = runner.transfers.pop(name, None)
        # A second acknowledgement of one transfer changes nothing.
        if pin is not None:
            unpin_path(runner.cache, pin, list(runner.transfers.values()))
    runner.check()


def _compact(runner: ScenarioRunner, step: Step) -> None:
    runner.cache.compact()
    runner.check()


def _reset(runner: ScenarioRunner, step: Step) -> None:
    runner.is_reset_accepted = runner.cache.reset()
    runner.forget_gone()
    runner.check()


def _expect(runner: ScenarioRunner, step: Step) -> None:
    if not isinstance(step.value, dict):
        raise ScenarioError(f"expect: an object is wanted, not {step.value!r}")
    runner.failures += failures(cast("dict[str, Json]", step.value), results(runner))


def _names(runner: ScenarioRunner, value: Json, where: str) -> list[str]:
    if value == "all" or value is True:
        return list(runner.tracks)
    names = (
        [str(each) for each in cast("list[Json]", value)]
        if isinstance(value, list)
        else [str(value)]
    )
    for name in names:
        if name not in runner.tracks:
            raise ScenarioError(f"{where}: no request is called {name!r}")
    return names


def _path(runner: ScenarioRunner, path: Json, options: Mapping[str, Json], where: str) -> Sequence:
    """The sequence that a path names: segments, or a request's name."""
    if isinstance(path, str) and path in runner.tracks:
        return runner.tracks[path].sequence
    text = runner.streams.text(segments(path, where))
    return runner.cache.new_sequence(
        "path",
        text.tokens,
        ((image.offset, image.count, image.key) for image in text.images),
        str(options.get("salt") or ""),
        str(options.get("adapter") or ""),
    )


_VERBS: dict[str, Callable[[ScenarioRunner, Step], None]] = {
    "submit": _submit,
    "step": _step,
    "begin": _begin,
    "commit": _commit,
    "run": _run,
    "finish": _finish,
    "abort": _abort,
    "preempt": _preempt,
    "evict": _evict,
    "lookup": _lookup,
    "remote": _remote,
    "transfer": _transfer,
    "compact": _compact,
    "reset": _reset,
    "release": _release,
    "expect": _expect,
}
