"""The scheduler's side: what is looked up, loaded and published, decided without waiting.

vLLM asks of every waiting request how many tokens lie elsewhere (`matched`), says what pages it has
got (`allocated`), and wants one message for the workers a step (`build`). Nothing here waits for
the network: a look-up that is out answers None, for `lookup_timeout` and `stall` at most, and the
request is computed after that.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvcs.names.errors import KvcsError
from kvcs.vllm.describe import refused_request
from kvcs.vllm.outcomes import Outcome
from kvcs.vllm.pages import blocks_computed, blocks_to_load, most_to_load, to_load
from kvcs.vllm.plan import LoadPlan, Plan, Report, SavePlan
from kvcs.vllm.settings import Settings, Way
from kvcs.vllm.transfer import Shared, Transfer
from kvsp.names.errors import KvspError
from kvsp.names.prefix import complete_blocks
from moqt.values.errors import MoqtError

MOST_REMEMBERED: Final = 4096
"""Prompts remembered as published, so that two requests of one prefix publish it once."""

QUICKLY: Final = 0.05
"""Seconds within which the rest of a load is expected to come, for a batch to wait for it."""


@dataclass(slots=True)
class _Asked:
    """A request that vLLM has asked about."""

    since: float
    prompt: int
    refused: bool = False
    settled: bool = False
    """The answer is 0 from now on."""
    published: int = 0
    """Tokens of it that somebody has published."""
    lookup: Any = None
    found: Any = None
    transfer: Transfer | None = None
    until: int = 0
    """Position up to which the transfer goes."""
    first: int = 0
    """Position from which the transfer goes."""
    local: int = 0
    """Tokens that were here when vLLM was told."""
    layerwise: bool | None = None
    """How it is loaded, once that was told to vLLM."""
    digest: bytes = b""
    """Of what is published of it here."""


@dataclass(slots=True)
class _Saving:
    """A prompt of which blocks are published as they are computed."""

    tokens: tuple[int, ...]
    """Those of all complete blocks of the prompt."""
    page_ids: list[int]
    computed: int
    done: int = 0
    """Blocks handed to the workers."""


class SchedulerSide:
    """Decides; `shared` has the client."""

    def __init__(
        self,
        shared: Shared,
        settings: Settings,
        *,
        page: int,
        block_tokens: int,
        most_layerwise: int,
        produces: bool,
        consumes: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prompts of more than `most_layerwise` tokens are loaded beside the batch."""
        self._shared = shared
        self._settings = settings
        self._page = page
        self._rows = block_tokens
        self._most_layerwise = most_layerwise
        self._produces = produces
        self._consumes = consumes
        self._now = now
        self._asked: dict[str, _Asked] = {}
        self._loads: list[LoadPlan] = []
        self._saving: dict[str, _Saving] = {}
        self._aborted: list[str] = []
        self._published: OrderedDict[bytes, float] = OrderedDict()
        self._step = self._heard = 0
        self._steps: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._last_end = 0.0
        self._running = 0
        """Requests that the last step computed something for."""

    # -- matching ---------------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `computed` ones can be loaded, and whether beside the batch;
        None while that is not known yet."""
        prompt = request.prompt_token_ids or []
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._ask(request, len(prompt))
        if asked.settled:
            return 0, False
        if asked.transfer is not None and asked.first > computed:
            self._drop(asked)  # pages that were here are not any more: it begins too late
        if asked.transfer is None:
            self._begin(request.request_id, asked, prompt, computed)
            if asked.settled or asked.transfer is None:
                return (0, False) if asked.settled else (None, False)
        return self._answer(request.request_id, asked, computed)

    def _ask(self, request: Any, prompt: int) -> _Asked:
        asked = self._asked[request.request_id] = _Asked(self._now(), prompt)
        why = refused_request(request)
        if why is not None:
            asked.refused = True
            self._settle(request.request_id, asked, Outcome.REFUSED, why)
        elif not self._consumes:
            asked.settled = True
        return asked

    def _begin(self, name: str, asked: _Asked, prompt: Sequence[int], computed: int) -> None:
        """Look the prompt up, and begin to load what is found."""
        most = most_to_load(len(prompt), self._page)
        least = max(self._settings.min_tokens, 1)
        if most - computed < least:
            why = f"{most} of {len(prompt)} tokens could come, {computed} are here"
            self._settle(name, asked, Outcome.TOO_SHORT, why)
            return
        try:
            asked.lookup = asked.lookup or self._shared.client.directory.ask(prompt)
            if not asked.lookup.done:
                if self._now() >= self._patience(asked):
                    self._settle(name, asked, Outcome.STALLED, "the look-up was not answered")
                return
            found = asked.lookup.found
        except (KvcsError, KvspError, MoqtError) as error:
            self._settle(name, asked, Outcome.REFUSED, f"it cannot be looked up: {error}")
            return
        asked.lookup = None
        if found is None:
            self._settle(name, asked, Outcome.MISS, "no prefix of it is published")
            return
        asked.published = found.tokens
        until = to_load(len(prompt), found.tokens, self._page)
        if until - computed < least:
            outcome = Outcome.MISS if until <= computed else Outcome.TOO_SHORT
            self._settle(
                name, asked, outcome, f"{found.tokens} tokens are published, {computed} are here"
            )
            return
        slower = self._shared.gate.refuses(until - computed, self._now())
        if slower is not None and self._settings.only_faster:
            self._settle(name, asked, Outcome.SLOWER, slower)
            return
        if len(self._shared.under_way) >= self._settings.loads:
            why = f"{self._settings.loads} loads are under way (the setting 'loads')"
            self._settle(name, asked, Outcome.BUSY, why)
            return
        asked.since = self._now()
        asked.found, asked.first, asked.until = found, computed, until
        blocks = blocks_to_load(range(computed, until), self._rows)
        try:
            asked.transfer = self._shared.begin(name, found, blocks)
        except (KvcsError, ValueError) as error:
            self._settle(name, asked, Outcome.REFUSED, f"it cannot be loaded: {error}")

    def _answer(self, name: str, asked: _Asked, computed: int) -> tuple[int | None, bool]:
        transfer = asked.transfer
        assert transfer is not None
        if asked.until <= computed:
            self._drop(asked)
            self._settle(name, asked, Outcome.MISS, f"{computed} tokens are here by now")
            return 0, False
        if asked.layerwise is None:
            if transfer.failed or not transfer.has(0) or not transfer.published:
                if not transfer.failed and self._now() < self._patience(asked):
                    return None, False
                outcome, why = transfer.failure or (
                    Outcome.STALLED,
                    "its first layer did not come in time",
                )
                self._drop(asked)
                self._settle(name, asked, outcome, why)
                return 0, False
            if not self._goes_on(name, asked, transfer):
                asked.layerwise = self._is_layerwise(transfer, asked)
        asked.local = computed
        return asked.until - computed, not asked.layerwise

    def _goes_on(self, name: str, asked: _Asked, transfer: Transfer) -> bool:
        """Whether the publication has further segments, of chunks that followed the one that names
        it: then they are loaded as well, beside the batch, as their layers come one segment after
        the other."""
        published = min(transfer.published, asked.found.most) * self._rows
        until = to_load(asked.prompt, published, self._page)
        if until <= asked.until:
            return False
        blocks = blocks_to_load(range(asked.first, until), self._rows)
        try:
            asked.transfer = self._shared.begin(name, asked.found, blocks)
        except (KvcsError, ValueError):
            return False
        asked.until, asked.published = until, published
        asked.layerwise = False
        return True

    def _patience(self, asked: _Asked) -> float:
        return asked.since + self._settings.lookup_timeout + self._settings.stall

    def _is_layerwise(self, transfer: Transfer, asked: _Asked) -> bool:
        """Whether the batch is to wait for its layers."""
        if asked.until > self._most_layerwise:
            return False
        if self._settings.load is not Way.AUTO:
            return self._settings.load is Way.LAYERWISE
        if not self._running or transfer.whole:
            return True  # nobody else is held up, or nothing is to be waited for
        tokens = asked.until - asked.first
        expected = self._shared.gate.seconds_to_load(tokens, self._now())
        return not transfer.producing and expected is not None and expected < QUICKLY

    def _settle(self, name: str, asked: _Asked, outcome: Outcome, why: str) -> None:
        asked.settled, asked.lookup = True, None
        self._shared.outcomes.note(name, outcome, why)

    def _drop(self, asked: _Asked) -> None:
        """Let go of a transfer that no page is waiting for."""
        if asked.transfer is not None:
            self._shared.end(asked.transfer.request)
        asked.transfer, asked.found, asked.layerwise = None, None, None

    # -- pages ------------------------------------------------------------------------------

    def allocated(self, request: Any, page_ids: Sequence[int], external: int) -> None:
        """vLLM has pages for a request, of which `external` tokens are to be loaded."""
        asked = self._asked.get(request.request_id)
        if asked is None or asked.transfer is None:
            return
        transfer = asked.transfer
        tokens = range(asked.local, asked.local + external)
        asked.transfer = None  # the workers' from now on
        if external <= 0 or asked.layerwise is None:
            asked.settled = True
            self._shared.end(transfer.request)
            return
        asked.settled = True
        self._loads.append(
            LoadPlan(
                request.request_id,
                asked.found,
                tokens,
                tuple(page_ids[: tokens.stop // self._page]),
                asked.layerwise,
            )
        )
        asked.found = None
        if not self._shared.worker_here:
            self._shared.end(transfer.request)  # each worker process loads for itself

    # -- a step -----------------------------------------------------------------------------

    def build(self, output: Any) -> Plan:
        """The message for the workers of one step."""
        loads, self._loads = tuple(self._loads), []
        aborted, self._aborted = tuple(self._aborted), []
        scheduled: dict[str, int] = output.num_scheduled_tokens
        prompt_tokens = self._prompt_tokens(output)
        saves = self._saves(output) if self._produces else ()
        self._step += 1
        if prompt_tokens and not any(load.layerwise for load in loads):
            self._steps[self._step] = (self._now(), prompt_tokens)
            while len(self._steps) > 64:
                self._steps.popitem(last=False)
        self._running = len(scheduled)
        awaited = not scheduled and any(
            asked.lookup is not None or asked.transfer is not None for asked in self._asked.values()
        )
        idle = not scheduled
        return Plan(self._step, self._heard, loads, saves, aborted, idle=idle, awaited=awaited)

    def _prompt_tokens(self, output: Any) -> int:
        """How many tokens of prompts this step computes."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        total = 0
        for name, before in computed.items():
            asked = self._asked.get(name)
            left = 0 if asked is None else asked.prompt - before
            total += max(0, min(left, output.num_scheduled_tokens.get(name, 0)))
        return total

    def _saves(self, output: Any) -> tuple[SavePlan, ...]:
        for new in output.scheduled_new_reqs:
            self._take_up(new)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            saving = self._saving.get(name)
            if saving is None:
                continue
            fresh = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:  # after a preemption all pages are others
                saving.page_ids = []
            saving.page_ids += list(fresh[0]) if fresh else []
            saving.computed = cached.num_computed_tokens[index]
        return tuple(
            plan
            for name, count in output.num_scheduled_tokens.items()
            if (saving := self._saving.get(name)) is not None
            and (plan := self._next(name, saving, count)) is not None
        )

    def _take_up(self, new: Any) -> None:
        """A request that is scheduled first: whether its prompt is to be published."""
        prompt = new.prompt_token_ids or []
        asked = self._asked.get(new.req_id)
        count = complete_blocks(len(prompt), self._rows) * self._rows
        if asked is None or asked.refused or not count:
            return
        if count - asked.published < max(self._settings.min_tokens, 1):
            return  # somebody has published it, or all but little
        tokens = tuple(prompt[:count])
        digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes()).digest()
        until = self._published.pop(digest, 0.0)
        known = until > self._now()
        self._published[digest] = until if known else self._now() + self._settings.keep_seconds
        if len(self._published) > MOST_REMEMBERED:
            self._published.popitem(last=False)
        if known:
            return
        asked.digest = digest
        self._saving[new.req_id] = _Saving(tokens, list(new.block_ids[0]), new.num_computed_tokens)

    def _next(self, name: str, saving: _Saving, count: int) -> SavePlan | None:
        """The blocks that this step completes of a request."""
        whole = len(saving.tokens)
        computed = min(saving.computed + count, whole)
        blocks = blocks_computed(saving.done, computed, self._rows)
        if not blocks:
            return None
        saving.done = blocks.stop
        pages = -(-blocks.stop * self._rows // self._page)
        if saving.done * self._rows == whole:
            del self._saving[name]
        return SavePlan(name, saving.tokens, blocks, tuple(saving.page_ids[:pages]))

    # -- what came of it ----------------------------------------------------------------------

    def heard(self, report: Report) -> None:
        """The workers' report of a step."""
        self._heard = max(self._heard, report.step)
        began = self._steps.pop(report.step, None)
        now = self._now()
        if began is not None:
            self._shared.gate.computed(began[1], now - max(began[0], self._last_end))
        self._last_end = now
        for octets, seconds in report.rates:
            self._shared.gate.loaded(octets, seconds, now)
        for name, (outcome, why, tokens, octets) in report.outcomes.items():
            if outcome is not Outcome.HIT and name in self._asked:
                self._published.pop(self._asked[name].digest, None)  # the workers withdraw it
            self._shared.outcomes.note(name, outcome, why, tokens=tokens, octets=octets)

    @property
    def requests(self) -> list[str]:
        """Those that vLLM has asked about and not finished."""
        return list(self._asked)

    def finished(self, request: Any) -> None:
        """A request has ended, in whatever way."""
        name = request.request_id
        asked = self._asked.pop(name, None)
        if asked is not None:
            self._drop(asked)
        if any(load.request == name for load in self._loads):
            self._loads = [load for load in self._loads if load.request != name]
            self._shared.end(name)
        if self._saving.pop(name, None) is not None:
            self._aborted.append(name)
            if asked is not None:
                self._published.pop(asked.digest, None)

    @property
    def remembered(self) -> int:
        """Requests of which something is kept here."""
        return len(self._asked) + len(self._saving) + len(self._loads)

    def close(self) -> None:
        """Let go of every transfer."""
        for asked in self._asked.values():
            self._drop(asked)
