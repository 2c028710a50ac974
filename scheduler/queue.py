"""The waiting jobs: in order, counted, and found by the cache block whose coming or going concerns them.

Each tenant's jobs are in order of their keys; tenants' heads are in order of key plus the tenant's share of service
already had, so that under contention service is divided by weight while within a tenant nothing but the key counts.

*Continuous calibration*: a job's remaining time depends on how many of its leading blocks are cached, and only two
events can change that number: the arrival of its next block, or the eviction of its last cached one. Jobs are filed
under both, so an event touches just the jobs it concerns, each at the cost of one removal and one insertion.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.order import Order
from scheduler.ordered_sums import OrderedSums, Place

__all__ = ["JobQueue", "common_blocks"]

Block = bytes | int
Match = Callable[[Sequence[Block], int, int], int]  # hashes, limit, number known to be cached -> number cached
Head = tuple[float, int, str]  # key with the tenant's share, job, tenant

_LOOKED_AT = 4  # jobs asked how far they share a prefix
_BEHIND_S = 1e-6  # beyond the rounding of scores
_AT_ONCE = 512  # jobs given a new place in one go: a few ms
_MOST_SIBLINGS = 256  # of each kind
_IDLE_TENANTS = 4096  # whose service is remembered while they wait for nothing


@dataclass(slots=True, eq=False)
class _Tenant:
    order: OrderedSums = field(default_factory=OrderedSums)
    served: float = 0.0  # seconds of service had, over weight
    weight: float = 1.0
    tokens: int = 0
    first: Place | None = None  # of its order
    head: Head | None = None  # that, as it stands among the heads


@dataclass(slots=True, eq=False)
class _Group:
    jobs: dict[int, Job] = field(default_factory=dict)
    cost_s: float = 0.0


class JobQueue:
    """Waiting jobs.

    ``match`` is the prefix index's; ``times`` predicts what remains until ``rescore`` replaces it;
    ``keepable_blocks``: how many blocks of a prefix can stay from one pass to the next; ``share`` in s a s: how
    strongly service had counts against a tenant.
    """

    def __init__(
        self,
        order: Order,
        times: JobTimeModel,
        match: Match,
        block_tokens: int,
        *,
        keepable_blocks: int = 0,
        share: float = 1.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._order, self._times, self._match, self._block_tokens = order, times, match, block_tokens
        self._keepable = keepable_blocks
        self._share, self._weights = share, dict(weights or {})
        self._jobs: dict[int, Job] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._heads: list[Head] = []
        self._idle: OrderedDict[str, None] = OrderedDict()  # tenants with nothing waiting, longest idle first
        self._by_next: dict[Block, dict[int, Job]] = {}
        self._by_last: dict[Block, dict[int, Job]] = {}
        self._groups: dict[int, _Group] = {}
        self._virtual = 0.0  # service had by whom was served last: where a tenant that comes back starts
        self._outdated: deque[int] = deque()  # jobs placed by predictions that no longer hold
        self.tokens = 0
        self.with_deadline = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def get(self, job_id: int) -> Job | None:
        return self._jobs.get(job_id)

    def jobs(self) -> Iterable[Job]:
        """In no order."""
        return self._jobs.values()

    # --- in and out --------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Finds what is cached of ``job`` and gives it its place. Raises ValueError if it waits already."""
        if job.job_id in self._jobs:
            raise ValueError(f"job {job.job_id} waits already")
        self._jobs[job.job_id] = job
        self.tokens += job.total_tokens
        self.with_deadline += job.deadline_s is not None
        tenant = self._tenants.get(job.tenant)
        if tenant is None:
            tenant = self._tenants[job.tenant] = _Tenant(weight=self._weights.get(job.tenant, 1.0))
        if not len(tenant.order):
            tenant.served = max(tenant.served, self._virtual)
            self._idle.pop(job.tenant, None)
        tenant.tokens += job.total_tokens
        self._groups.setdefault(job.group, _Group()).jobs[job.job_id] = job
        job.cached_blocks = self._match(job.block_hashes, job.max_cached_blocks, 0)
        self._place(job, tenant)

    def remove(self, job_id: int) -> Job | None:
        """None if it does not wait."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        tenant = self._tenants[job.tenant]
        self._displace(job, tenant)
        self.tokens -= job.total_tokens
        self.with_deadline -= job.deadline_s is not None
        tenant.tokens -= job.total_tokens
        group = self._groups[job.group]
        del group.jobs[job_id]
        if not group.jobs:
            del self._groups[job.group]
        if not len(tenant.order):
            self._idle[job.tenant] = None
            if len(self._idle) > _IDLE_TENANTS:
                del self._tenants[self._idle.popitem(last=False)[0]]
        return job

    def take(self, jobs: Sequence[Job]) -> None:
        """They are to be computed: out of the queue. ``serve`` charges their tenants as it happens."""
        for job in reversed(jobs):  # the first last: the queue's head changes once
            self._virtual = max(self._virtual, self._tenants[job.tenant].served)
            self.remove(job.job_id)

    def serve(self, name: str, seconds: float) -> None:
        """``name`` has had so many seconds of computing."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.served += seconds / tenant.weight
            self._show_head(name, tenant)

    def defer(self, jobs: Iterable[Job], score: float) -> None:
        """Moves those of ``jobs`` that go before ``score`` just behind it."""
        for job in jobs:
            short = score - self.score(job)
            if short >= 0:
                tenant = self._tenants[job.tenant]
                self._displace(job, tenant)
                job.defer_s += short + _BEHIND_S
                self._place(job, tenant)

    # --- order -------------------------------------------------------------------------------------------------------

    def head(self) -> Job | None:
        return self._jobs[self._heads[0][1]] if self._heads else None

    def head_score(self) -> float:
        """The head's key with its tenant's share. Raises IndexError when empty."""
        return self._heads[0][0]

    def score(self, job: Job) -> float:
        """The key of a waiting job with its tenant's share."""
        return job.key + self.charge(job.tenant)

    def charge(self, name: str) -> float:
        """What service had by now adds to the keys of a tenant's jobs, waiting or begun."""
        tenant = self._tenants.get(name)
        return self._share * (self._virtual if tenant is None else tenant.served)

    def in_order(self) -> Iterator[Job]:
        """All, first to run first, as if none of them were charged. The queue must not change meanwhile."""
        if len(self._heads) == 1:
            for _, job_id in self._tenants[self._heads[0][2]].order:
                yield self._jobs[job_id]
            return
        for _, job_id in heapq.merge(*(self._shifted(self._tenants[name]) for _, _, name in self._heads)):
            yield self._jobs[job_id]

    def ahead_s(self, job: Job) -> float:
        """Backlog of the jobs that go before ``job``, which waits, in s."""
        score = self.score(job)
        total = 0.0
        for _, _, name in self._heads:
            tenant = self._tenants[name]
            key = job.key if name == job.tenant else score - self._share * tenant.served
            total += tenant.order.sum_before((key, job.job_id))
        return total

    def total_s(self) -> float:
        return sum((self._tenants[name].order.total() for _, _, name in self._heads), 0.0)

    def of_tenant(self, name: str) -> tuple[int, int, float]:
        """Jobs, tokens and seconds that wait for ``name``."""
        tenant = self._tenants.get(name)
        return (len(tenant.order), tenant.tokens, tenant.order.total()) if tenant else (0, 0, 0.0)

    def of_group(self, group: int) -> tuple[Job | None, float]:
        """The longest waiting job of a group, and the seconds that all of it that waits will take."""
        found = self._groups.get(group)
        return (None, 0.0) if found is None else (next(iter(found.jobs.values())), found.cost_s)

    def siblings(self, job: Job) -> list[Job]:
        """The waiting jobs of its group, then those whose next block is also its next, both in the order filed."""
        group = self._groups.get(job.group)
        found = dict(islice(group.jobs.items(), _MOST_SIBLINGS)) if group is not None else {}
        block = self._next_block(job)
        if block is not None:
            found.update(islice(self._by_next.get(block, {}).items(), _MOST_SIBLINGS))
        found.pop(job.job_id, None)
        return list(found.values())

    # --- calibration -------------------------------------------------------------------------------------------------

    def inserted(self, blocks: Iterable[Block]) -> None:
        """These became readable. Of the jobs that one of them concerns, those beyond ``_AT_ONCE`` learn of it in
        ``catch_up``: until then they stand where they stood, at what they would have cost."""
        for block in blocks:
            filed = self._by_next.get(block, {})
            concerned = list(islice(filed.values(), _AT_ONCE))
            self._outdated.extend(islice(filed, _AT_ONCE, None))
            for job in concerned:
                self._recount(job, job.cached_blocks, job.max_cached_blocks)

    def evicted(self, blocks: Iterable[Block]) -> None:
        """These are no longer readable."""
        for block in blocks:
            for job in list(self._by_last.get(block, {}).values()):
                self._recount(job, 0, job.cached_blocks)

    def rescore(self, times: JobTimeModel) -> None:
        """From now on ``times`` predict. Jobs that wait already are put in their new places by ``catch_up``."""
        self._times = times
        self._outdated = deque(self._jobs)

    def catch_up(self, most: int = _AT_ONCE) -> None:
        """Gives up to ``most`` of the jobs whose times changed all at once their new places."""
        for _ in range(min(most, len(self._outdated))):
            job = self._jobs.get(self._outdated.popleft())
            if job is not None:
                self._recount(job, job.cached_blocks, job.max_cached_blocks)

    def wanted(self, block: Block) -> bool:
        """Whether a waiting job's cached prefix ends with ``block`` (keep_policy.Demand)."""
        return block in self._by_last

    def wanted_depth(self, hashes: Sequence[Block], start: int) -> int:
        """How many leading blocks of ``hashes`` some waiting job whose cache ends at ``start`` begins with."""
        if start >= len(hashes):
            return start
        depth = start
        for job, _ in zip(self._by_next.get(hashes[start], {}).values(), range(_LOOKED_AT), strict=False):
            depth = max(depth, common_blocks(hashes, job.block_hashes, start, job.max_cached_blocks))
        return depth

    # --- inside ------------------------------------------------------------------------------------------------------

    def _recount(self, job: Job, at_least: int, at_most: int) -> None:
        tenant = self._tenants[job.tenant]
        self._displace(job, tenant)
        job.cached_blocks = self._match(job.block_hashes, at_most, at_least)
        self._place(job, tenant)

    def _place(self, job: Job, tenant: _Tenant) -> None:
        """Times and files a job whose ``cached_blocks`` is right."""
        hashes, cached, tokens, block = job.block_hashes, job.cached_blocks, job.total_tokens, self._block_tokens
        job.remaining_s = job.cost_s = self._times.predict(tokens - cached * block, cached * block) + job.extra_s
        if cached < job.max_cached_blocks:
            mates = self._by_next.setdefault(hashes[cached], {})
            if mates:
                if job.shared_blocks <= cached:
                    mate = mates[next(reversed(mates))]
                    job.shared_blocks = common_blocks(hashes, mate.block_hashes, cached + 1, (tokens - 1) // block)
                # What the pool cannot keep is computed again by the next pass.
                shared = min(job.shared_blocks, cached + self._keepable) * block
                job.cost_s = self._times.predict(tokens - shared, shared) + job.extra_s
            mates[job.job_id] = job
        if cached:
            self._by_last.setdefault(hashes[cached - 1], {})[job.job_id] = job
        job.key = self._order.key(job)
        place = (job.key, job.job_id)
        tenant.order.add(place, job.cost_s)
        self._groups[job.group].cost_s += job.cost_s
        if tenant.first is None or place < tenant.first:
            self._show_head(job.tenant, tenant)

    def _displace(self, job: Job, tenant: _Tenant) -> None:
        hashes, cached = job.block_hashes, job.cached_blocks
        if cached < job.max_cached_blocks:
            _unfile(self._by_next, hashes[cached], job)
        if cached:
            _unfile(self._by_last, hashes[cached - 1], job)
        place = (job.key, job.job_id)
        tenant.order.remove(place)
        self._groups[job.group].cost_s -= job.cost_s
        if place == tenant.first:
            self._show_head(job.tenant, tenant)

    def _next_block(self, job: Job) -> Block | None:
        return job.block_hashes[job.cached_blocks] if job.cached_blocks < job.max_cached_blocks else None

    def _show_head(self, name: str, tenant: _Tenant) -> None:
        """Puts the tenant among the heads as it now is."""
        if tenant.head is not None:
            del self._heads[bisect_left(self._heads, tenant.head)]
        tenant.first = tenant.order.first() if len(tenant.order) else None
        tenant.head = None
        if tenant.first is not None:
            key, job_id = tenant.first
            tenant.head = (key + self._share * tenant.served, job_id, name)
            insort(self._heads, tenant.head)

    def _shifted(self, tenant: _Tenant) -> Iterator[Place]:
        offset = self._share * tenant.served
        return ((key + offset, job_id) for key, job_id in tenant.order)


def common_blocks(one: Sequence[Block], other: Sequence[Block], at_least: int, limit: int) -> int:
    """How many of the first ``limit`` blocks two prompts share, given that ``at_least`` are shared: equal hashes mean
    equal prefixes, so bisection finds it."""
    low, high = at_least, min(limit, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _unfile(files: dict[Block, dict[int, Job]], block: Block, job: Job) -> None:
    filed = files[block]
    del filed[job.job_id]
    if not filed:
        del files[block]
