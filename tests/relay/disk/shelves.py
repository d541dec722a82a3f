"""A relay with a disk tier whose jobs are done when the test says so, and a clock of its own."""

from __future__ import annotations

from collections import deque

from moqt.session import SessionConfig
from relay.config import Clock, RelayConfig
from relay.disk.files import Folder
from relay.disk.records import Damaged
from relay.disk.tier import DiskTier
from relay.scopes import Scopes
from tests.relay.star import JOIN, NAME, Star, everything, track

EPOCH = 1_800_000_000.0


class Hand:
    """A Worker that does what is to be done when it is told to."""

    def __init__(self):
        self.jobs = deque()
        self.held = False
        """Nothing is done: the disk hangs."""
        self.done = []
        """The functions that were called, by name."""

    def later(self, seconds, call):
        self.jobs.append(call)

    def submit(self, job, done, failed, *, writes=False):
        def run():
            self.done.append(getattr(job, "func", job).__name__)
            try:
                result = job()
            except (OSError, Damaged) as error:
                failed(error)
            else:
                done(result)

        self.jobs.append(run)

    def run(self):
        """Do all; whether there was something to do."""
        moved = False
        while self.jobs and not self.held:
            moved = True
            self.jobs.popleft()()
        return moved


class Shelves(Star):
    """A Star in whose middle there is a relay with files in `folder`."""

    def __init__(self, folder, *, wall=EPOCH, policy=None, **settings):
        settings.setdefault("disk_octets", 1 << 30)
        settings.setdefault("publisher_linger", 0)
        super().__init__()
        self.folder = folder
        self.wall = wall
        self.policy = policy
        self.settings = settings
        self.start()

    def start(self):
        config, clock = RelayConfig(**self.settings), Clock()
        self.hand = Hand()
        self.disk = DiskTier(Folder(self.folder), self.hand, config, clock, self.time)
        self.disk.found(*self.disk.folder.scan())
        self.disk.reading = False
        self.relay = Scopes(config, self.policy, clock=clock, disk=self.disk)
        self.began = self.now = 0.0

    def time(self):
        return self.wall + self.now

    def crash(self, seconds=0.0):
        """The process is killed, and started again after so long."""
        self.pairs.clear()
        self.wall += self.now + seconds
        self.disk.folder.close()
        self.start()

    def run(self, rounds=200_000):
        super().run(rounds)
        while self.hand.run():
            super().run(rounds)
            super().run(rounds)  # a publisher that is asked now stands before who asks

    @property
    def files(self):
        """Those of whole tracks."""
        return sorted(self.folder.glob("*.track"))


def at(path):
    return {"client_config": SessionConfig(path=path, authority="relay.example")}


def stored(star, groups=3, *, size=100, name=NAME, path="/", **options):
    """A complete track, published, read once and left by its publisher."""
    store = track(groups, size=size, ended=True, name=name, **options)
    publisher = star.publisher(store, **at(path))
    _, collector = star.subscriber(JOIN, name, **at(path))
    assert collector.payloads == everything(groups, size=size)
    star.pass_time(1)
    star.kill(publisher)
