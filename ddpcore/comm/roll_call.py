"""Who is left of the ranks of a process group, as a store records it: the store orders, and no single rank must live.

Every rank has a thread that answers roll calls. A rank that sees an error opens the next *generation* in the store and
calls the roll: who is dead does not answer. When all that answer have come too, the first of them writes the list of
members of the generation; the store takes the first list only.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ddpcore.comm.own_group import own_client
from ddpcore.comm.process import gather_objects

ANSWER_SECONDS = 1.0  # a rank that does not answer for so long is dead; ranks look for calls 20 times in this time
_POLL_SECONDS = ANSWER_SECONDS / 20


_RUN_KEY = "ddpcore/elastic run"


def new_run(group: dist.ProcessGroup, timeout: float) -> dist.Store:
    """The place of a new run in the store of a group. Collective."""
    store = own_client(c10d._get_process_group_store(group))
    token = gather_objects(group, secrets.token_hex(8), "the start of the membership", timeout)[0]
    if dist.get_rank(group) == 0:
        store.set(_RUN_KEY, token)  # where a rank that joins later looks
    return dist.PrefixStore(f"ddpcore/{token}", store)


def last_run(store: dist.Store, timeout: float) -> dist.Store:
    """The place of the last run that was begun in a store. RuntimeError: there is none."""
    store = own_client(store)
    deadline = time.monotonic() + timeout
    while not store.check([_RUN_KEY]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the store has no run with on_failure='shrink' after {timeout:g} s: start that first")
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(f"ddpcore/{bytes(store.get(_RUN_KEY)).decode()}", store)


class RollCall:
    """The record of generations in a store that all ranks reach, and that outlives each of them.

    Args:
        store: under a prefix that no other run uses.
        rank: the id of this rank.
        timeout: seconds that a living rank may let the others wait.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: float) -> None:
        self._store, self._rank, self.timeout = store, rank, timeout
        self.generation = 0
        self.asked = 0  # how many ranks have asked to join so far, as far as this rank knows
        self._opened = 0  # the last generation that a rank has opened, as far as this rank knows
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True, name="ddpcore-roll-call")
        self._thread.start()

    def enter(self, rank: int) -> None:
        """Take part from now on, as a rank that has joined."""
        self._rank = rank

    def close(self) -> None:
        """Answer no more. The others then see this rank as gone."""
        self._is_closed.set()

    @property
    def is_called(self) -> bool:
        """Whether a rank has opened the next generation."""
        return self._opened > self.generation

    def _answer(self) -> None:
        answered: tuple[int, int] = 0, 0
        while not self._is_closed.wait(_POLL_SECONDS):
            generation = self.generation + 1
            try:
                self.asked = self._store.add("joins", 0)
                call = self._store.add(f"{generation}/call", 0)
                if call and self._rank >= 0 and (generation, call) != answered:
                    self._store.set(f"{generation}/alive/{self._rank}", str(call))
                    answered = generation, call
                    self._opened = generation
            except RuntimeError:  # the store is gone: a wait of this rank says so
                return

    def next_generation(self, members: tuple[int, ...], state: int) -> tuple[tuple[int, ...], list[int]]:
        """Open or join the next generation. Returns its members, on each of them the same, and the state of each.

        Args:
            members: of this generation.
            state: a number that the others must know.

        Raises:
            RuntimeError: a living member does not come in time, the store is gone, or this rank is not a member.
        """
        try:
            agreed = self._agree(members, state)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise RuntimeError(
                f"the store of the process group is gone ({str(error).partition(chr(10))[0]}): keep it outside of the "
                "ranks, by torchrun's agent or a FileStore"
            ) from error
        if self._rank not in agreed:
            raise RuntimeError(f"the others went on without rank {self._rank}, which did not answer: start it again")
        number = self.generation + 1
        states = [int(self._store.get(f"{number}/ready/{one}")) for one in agreed]
        self.generation = number
        return agreed, states

    def write_once(self, key: str, value: object) -> Any:
        """Write a value as JSON unless there is one already. Returns the one that is there."""
        return json.loads(bytes(self._store.compare_set(key, "", json.dumps(value))))

    def write(self, key: str, value: object) -> None:
        """Write a value as JSON."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The value of a key, or None."""
        return json.loads(bytes(self._store.get(key))) if self._store.check([key]) else None

    def wait_for(self, key: str) -> Any:
        """The value of a key, waiting for it. RuntimeError: it does not come in time.

        It looks again after 1/50 of the time that it has waited so far, because the rank that writes the value may wait
        for this one.
        """
        began = time.monotonic()
        while (value := self.read(key)) is None:
            waited = time.monotonic() - began
            if waited > self.timeout:
                raise RuntimeError(f"no rank of the run answered within {self.timeout:g} s: is it still training?")
            time.sleep(min(max(waited / 50, 0.001), _POLL_SECONDS))
        return value

    def ask(self) -> int:
        """Ask to join. Returns the number of the request, from 1."""
        return int(self._store.add("joins", 1))

    def group_store(self) -> dist.Store:
        """Where the members of this generation connect."""
        return dist.PrefixStore(f"{self.generation}/group", self._store)

    def _agree(self, members: tuple[int, ...], state: int) -> tuple[int, ...]:
        number, store = self.generation + 1, self._store
        list_key = f"{number}/members"
        store.set(f"{number}/ready/{self._rank}", str(state))
        deadline = time.monotonic() + self.timeout
        while not store.check([list_key]):
            call = store.add(f"{number}/call", 1)
            asked = time.monotonic()
            left = self._left(number, members, call, asked + ANSWER_SECONDS)
            waiting = [one for one in left if not store.check([f"{number}/ready/{one}"])]
            if not waiting:
                return self._decided(store.compare_set(list_key, "", json.dumps(left)))
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {waiting} live and did not come within {self.timeout:g} s after a failure")
        return self._decided(store.get(list_key))

    def _left(self, number: int, members: tuple[int, ...], call: int, until: float) -> list[int]:
        """The members that are ready or answer the call; it returns at once when all do."""
        left: list[int] = []
        while True:
            left = [one for one in members if self._is_left(number, one, call)]
            if len(left) == len(members) or time.monotonic() > until:
                return left
            time.sleep(_POLL_SECONDS / 5)

    def _is_left(self, number: int, one: int, call: int) -> bool:
        key = f"{number}/alive/{one}"
        return self._store.check([f"{number}/ready/{one}"]) or (
            self._store.check([key]) and int(self._store.get(key)) >= call
        )

    @staticmethod
    def _decided(value: Any) -> tuple[int, ...]:
        return tuple(json.loads(bytes(value)))
