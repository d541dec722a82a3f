"""The worker's side by itself: what caches it takes, and ranks that have some of the heads each."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from kvcs.vllm.describe import RefusedError
from kvcs.vllm.outcomes import Outcome
from kvcs.vllm.pages import UnknownPagesError
from kvcs.vllm.plan import LoadPlan, Plan, Report, SavePlan
from kvcs.vllm.ranks import heads_of
from kvcs.vllm.settings import Settings
from kvcs.vllm.transfer import Shared
from kvcs.vllm.working import WorkerSide
from tests.kvcs.vllm.client import MemoryClient, World
from tests.kvcs.vllm.engine import kv_of
from tests.kvcs.vllm.stories import DIM, HEADS, LAYERS, descriptor_of, prompt

PAGE, PAGES = 16, 8
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
SETTINGS = Settings.parse({"relay": "moqt://a", "scope_key_file": "b"})
TOKENS = prompt(64)
WHOLE = [kv_of(TOKENS, layer, HEADS, DIM, "float32") for layer in range(LAYERS)]


def worker(world: World, client=None, **rank) -> WorkerSide:
    """One with a client of its own."""
    descriptor = descriptor_of(16)
    shared = Shared(client or MemoryClient(world, descriptor), descriptor)
    return WorkerSide(shared, SETTINGS, page=PAGE, **rank)


def caches(heads: int = HEADS, dtype="float32", page: int = PAGE) -> dict[str, np.ndarray]:
    return {name: np.zeros((PAGES, heads, page, 2 * DIM), dtype) for name in NAMES}


def test_the_caches_of_the_descriptor_are_taken() -> None:
    worker(World(16, LAYERS)).register(caches())


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_an_element_type_that_flags_do_not_show_is_refused(dtype: str) -> None:
    with pytest.raises(RefusedError, match=r"layer 0 has a cache of .*--kv-cache-dtype auto"):
        worker(World(16, LAYERS)).register(caches(dtype=dtype))


def test_layers_that_share_a_cache_or_are_of_a_draft_model_are_refused() -> None:
    made = caches()
    with pytest.raises(RefusedError, match="caches of 2 layers"):
        worker(World(16, LAYERS)).register({name: made[name] for name in NAMES[:2]})
    with pytest.raises(RefusedError, match="caches of 4 layers"):
        worker(World(16, LAYERS)).register({**made, "draft.layers.3.attn": made[NAMES[0]]})


def test_heads_and_pages_that_are_others_than_they_should_be_are_refused() -> None:
    for wrong in (caches(heads=1), caches(page=32)):
        with pytest.raises(UnknownPagesError, match="is not known"):
            worker(World(16, LAYERS)).register(wrong)


def of_rank(part: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    mine = heads_of(rank, ranks, HEADS)
    return part[:, mine.start : mine.stop]


class Gathering:
    """What brings tensors of all ranks together, the first rank being the last to call."""

    def __init__(self, ranks: int) -> None:
        self._sent: list[deque[np.ndarray]] = [deque() for _ in range(ranks)]

    def of(self, rank: int):
        def gather(part):
            self._sent[rank].append(part)
            return None if rank else [each.popleft() for each in self._sent]

        return gather


def in_pages(part: np.ndarray) -> np.ndarray:
    """[tokens, heads, dim] as pages of [heads, page, dim]."""
    return part.reshape(-1, PAGE, *part.shape[1:]).swapaxes(1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_publish_every_head_once(ranks: int) -> None:
    world, gathering, page_ids = World(16, LAYERS), Gathering(ranks), (3, 1, 6, 2)
    plan = Plan(1, saves=(SavePlan("r", tuple(TOKENS), range(4), page_ids),))
    sides, held = [], []
    for rank in range(ranks):
        gather = gathering.of(rank) if ranks > 1 else None
        side, own = (
            worker(world, rank=rank, ranks=ranks, gather=gather),
            caches(HEADS // ranks or 1),
        )
        side.register(own)
        for name, (k, v) in zip(NAMES, WHOLE, strict=True):
            own[name][list(page_ids), ..., :DIM] = in_pages(of_rank(k, rank, ranks))
            own[name][list(page_ids), ..., DIM:] = in_pages(of_rank(v, rank, ranks))
        side.bind(plan)
        sides.append(side)
        held.append(own)
    for name in NAMES:
        for rank in reversed(range(ranks)):
            sides[rank].save_layer(name, held[rank][name])
    (published,) = world.publications
    assert published.complete
    for layer, kv in enumerate(WHOLE):
        for came, wanted in zip(published.kv(layer), kv, strict=True):
            assert np.array_equal(came, wanted)


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_fills_its_pages_with_its_own_heads(ranks: int, layerwise: bool) -> None:
    world, page_ids = World(16, LAYERS), (3, 1, 6, 2)
    world.put(TOKENS, WHOLE)
    for rank in range(ranks):
        client = MemoryClient(world, descriptor_of(16))
        side = worker(world, client, rank=rank, ranks=ranks, gather=lambda part: None)
        own = caches(HEADS // ranks or 1)
        side.register(own)
        found = client.ask([*TOKENS, 1]).found
        side.bind(Plan(1, loads=(LoadPlan("r", found, range(16, 64), page_ids, layerwise),)))
        for name in NAMES:
            side.wait_for_layer(name)
        side.wait_for_save()
        assert side.finished(set()) == (set() if layerwise else {"r"})
        assert not side.failed_pages()
        assert side.report().outcomes["r"][0] is Outcome.HIT
        for name, (k, v) in zip(NAMES, WHOLE, strict=True):
            came = own[name][list(page_ids)]
            assert not came[0].any(), "what was here already is not touched"
            assert np.array_equal(came[1:, ..., :DIM], in_pages(of_rank(k, rank, ranks))[1:])
            assert np.array_equal(came[1:, ..., DIM:], in_pages(of_rank(v, rank, ranks))[1:])


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_load_that_fails_on_one_rank_leaves_ranks_in_step_and_nothing_published(
    layerwise: bool,
) -> None:
    """Ranks that do not gather alike wait for each other for ever; and what the others have
    computed with it is wrong on the ranks that it did not fail on, too."""
    world, gathering, page_ids = World(16, LAYERS), Gathering(2), (3, 1, 6, 2)
    world.put(TOKENS[:32], [(k[:32], v[:32]) for k, v in WHOLE])
    save = SavePlan("r", tuple(TOKENS), range(4), page_ids)
    clients = [MemoryClient(world, descriptor_of(16)) for _ in range(2)]
    found = [client.ask(TOKENS).found for client in clients]
    sides, held = [], []
    for rank, client in enumerate(clients):
        sides.append(worker(world, client, rank=rank, ranks=2, gather=gathering.of(rank)))
        held.append(caches(HEADS // 2))
        sides[rank].register(held[rank])
        client.layers = 1 if rank else LAYERS
        load = LoadPlan("r", found[rank], range(32), page_ids[:2], layerwise)
        sides[rank].bind(Plan(1, loads=(load,), saves=(save,) if layerwise else ()))
    clients[1].fail()
    if not layerwise:
        for side in sides:
            side.wait_for_save()
            assert side.finished(set()) == {"r"}
            side.bind(Plan(2, heard=0, saves=(save,)))
    for name in NAMES:
        for rank in (1, 0):
            sides[rank].wait_for_layer(name)
            sides[rank].save_layer(name, held[rank][name])
    for side in sides:
        side.wait_for_save()
        side.bind(Plan(3, heard=2))
    assert [side.failed_pages() for side in sides] == [set(), {3, 1}]
    if layerwise:
        assert all(each.aborted for each in world.publications[1:])


@pytest.mark.parametrize("wrong", [None, 0, LAYERS - 1])
def test_nothing_is_published_whole_before_what_it_was_computed_from_is_confirmed(wrong) -> None:
    world, page_ids = World(16, LAYERS), (3, 1, 6, 2)
    world.put(TOKENS[:32], [(k[:32], v[:32]) for k, v in WHOLE])
    client = MemoryClient(world, descriptor_of(16))
    found, client.corrupt = client.ask(TOKENS).found, wrong
    side, held = worker(world, client), caches()
    side.register(held)
    load = LoadPlan("r", found, range(32), page_ids[:2], True)
    side.bind(Plan(1, loads=(load,), saves=(SavePlan("r", tuple(TOKENS), range(4), page_ids),)))
    for name in NAMES:
        side.wait_for_layer(name)
        side.save_layer(name, held[name])
    published = world.publications[1]
    assert not published.complete
    side.wait_for_save()
    assert (published.complete, published.aborted) == (wrong is None, wrong is not None)


def test_a_load_that_failed_on_one_rank_has_failed() -> None:
    well = Report(3, {"r": (Outcome.HIT, "it came", 64, 100)}, [(100, 1.0)])
    ill = Report(3, {"r": (Outcome.STALLED, "it did not", 0, 40)})
    for merged in (well.merged(ill), ill.merged(well)):
        assert merged.outcomes["r"][0] is Outcome.STALLED and merged.rates == [(100, 1.0)]
