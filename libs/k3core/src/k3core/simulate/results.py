"""What a case came to: every request, every lookup and the pool, in the words of a scenario file."""

from k3core.cache.audit import audit, leaked_pages
from k3core.simulate.expectations import failures
from k3core.simulate.scenario import ScenarioRunner, Track
from k3core.simulate.scenario_file import Json


def results(runner: ScenarioRunner) -> dict[str, Json]:
    """Every request and every lookup by its name, and the pool, as they are now."""
    found: dict[str, Json] = {name: _request_result(runner, name) for name in runner.tracks}
    found.update(runner.lookups)
    found["pool"] = _pool_result(runner)
    return found


def universal_failures(runner: ScenarioRunner) -> list[str]:
    """What must hold of any case: outputs as with caching off, and every page back."""
    found = [
        f"{name}: its output is another"
        for name, track in runner.tracks.items()
        if not _is_right(track)
    ]
    pinned = [unit for pin in runner.transfers.values() for unit in pin.units]
    found += audit(runner.cache, pinned)
    is_quiet = not runner.scheduler.has_work() and not runner.transfers
    config = runner.case.cache
    if is_quiet and config.memory == "two_pools":
        wanted = {"reclaimable_pages": config.num_pages, "reclaimable_slots": config.num_slots}
        found += failures({**wanted, "leaked": 0, "referenced": 0}, _pool_result(runner), "pool")
    return found


def _request_result(runner: ScenarioRunner, name: str) -> dict[str, Json]:
    track = runner.tracks[name]
    usage = runner.scheduler.usage(name) if track.status != "refused" else None
    return {
        "status": track.status,
        "prompt_tokens": len(track.request.tokens),
        "hit": usage.cached_local + usage.cached_remote if usage else 0,
        "hit_local": usage.cached_local if usage else 0,
        "hit_remote": usage.cached_remote if usage else 0,
        "checkpoint": (usage.checkpoint or None) if usage else None,
        "computed": usage.computed if usage else 0,
        "matched": usage.matched if usage else 0,
        "forwards": list(track.forwards),
        "exported": sorted(set(track.exported)),
        "encoder_runs": list(track.encoder_runs),
        "output_ok": _is_right(track),
        "reuse_gap": usage.reuse_gap if usage else 0,
        "reason": (usage.gap_reason or None) if usage else (track.reason or None),
        "sealed": _sealed_on(runner, track),
    }


def _pool_result(runner: ScenarioRunner) -> dict[str, Json]:
    cache, groups = runner.cache, runner.cache.states.groups
    free_slots = cache.pool.free_state_pages() // groups
    stats = cache.stats
    embeddings = runner.scheduler.embeddings
    return {
        "free_pages": cache.pool.free_rows(),
        "free_slots": free_slots,
        "reclaimable_pages": cache.reclaimable_pages(),
        "reclaimable_slots": (cache.pool.free_state_pages() + cache.states.num_idle_pages)
        // groups,
        "referenced": cache.paged.num_referenced_pages(),
        "leaked": leaked_pages(cache),
        "sealed": {name: _sealed_on(runner, track) for name, track in runner.tracks.items()},
        "states": len(cache.states.sealed),
        "units": len(cache.paged.index),
        "copies": runner.device.num_copies,
        "moved_bytes": cache.pool.num_moves() * cache.config.page_bytes,
        "waiting": runner.scheduler.num_waiting,
        "running": runner.scheduler.num_running,
        "in_flight": len(runner.flying),
        "queries": stats.queries,
        "hits": stats.hit_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "resumed_queries": stats.resumed_queries,
        "duplicates": stats.duplicates,
        "evicted_units": stats.evicted_units,
        "evicted_states": sum(stats.evicted_states.values()),
        "rows_evicted_for_states": stats.rows_evicted_for_states,
        "reuse_gap": sum(stats.gap_tokens.values()),
        "reset": runner.is_reset_accepted,
        "encoder_used": embeddings.used if embeddings else 0,
        "encoder_free": embeddings.free if embeddings else 0,
        "encoder_dropped": list(runner.dropped_images),
    }


def _is_right(track: Track) -> bool:
    """Whether the output so far is that of a run without a cache."""
    wanted = list(track.output_wanted)
    is_due = track.status == "finished" and not track.is_cut and not track.reason
    return track.output == (wanted if is_due else wanted[: len(track.output)])


def _sealed_on(runner: ScenarioRunner, track: Track) -> list[int]:
    sealed = runner.cache.states.sealed
    return [sealed[digest].position for digest in track.sequence.digests if digest in sealed]
