"""Plays a scenario against a server: open loop, every request at its intended time."""

import asyncio
import random
import time
from collections.abc import Iterator

import aiohttp

from loadtest import arrivals, client, target, workload
from loadtest.record import Record
from loadtest.scenario import Scenario, ScenarioError

MAX_TIME_S = 300.0
"""A request that takes longer counts as failed."""


def send_times(scenario: Scenario) -> Iterator[float]:
    """Gives the scenario's send times.

    Raises:
        ScenarioError: unknown kind of arrivals.
    """
    match scenario.arrivals:
        case "constant":
            return arrivals.constant(scenario.rate_rps, scenario.duration_s)
        case "poisson":
            return arrivals.poisson(scenario.rate_rps, scenario.duration_s, scenario.seed)
        case "burst":
            return arrivals.burst(
                scenario.rate_rps, scenario.duration_s, scenario.burst_factor, scenario.seed
            )
        case _:
            raise ScenarioError("arrivals must be constant, poisson or burst")


async def play(scenario: Scenario, url: str, api_key: str = "") -> list[Record]:
    """Sends all requests of a scenario and waits for every answer.

    Raises:
        ScenarioError: unknown kind of arrivals.
        TargetError: the server cannot be played against.
    """
    url = target.base_url(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=MAX_TIME_S)
    generator = random.Random(scenario.seed)
    records: list[Record] = []
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        bodies = workload.bodies(scenario, await target.first_model(session, url))
        start_ns = time.monotonic_ns()
        async with asyncio.TaskGroup() as group:
            for index, due_s in enumerate(send_times(scenario)):
                record = Record(index=index, intended_ns=start_ns + int(due_s * 1e9))
                record.is_warmup = due_s < scenario.warmup_s
                records.append(record)
                await asyncio.sleep(max(0.0, (record.intended_ns - time.monotonic_ns()) / 1e9))
                leaves = generator.random() < scenario.cancel_share
                group.create_task(
                    client.send(session, url, next(bodies), record, leaves_after_first=leaves)
                )
    return records
