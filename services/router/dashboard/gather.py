"""What the page is made of, read from the router's living parts."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay import __version__
from kvrelay.services.router.admission import Admission
from kvrelay.services.router.dashboard.cluster import ClusterFacts
from kvrelay.services.router.dispatch import Dispatcher
from kvrelay.services.router.membership import Membership
from kvrelay.services.router.observe import Observer


@dataclass(frozen=True, slots=True)
class Gathering:
    """On the router's event loop. Calling it is one look."""

    model: str
    port: int
    dispatcher: Dispatcher
    membership: Membership
    observer: Observer
    admission: Admission

    def __call__(self) -> ClusterFacts:
        self.membership.look()  # a router at rest asks Redis rarely: the next look finds it fresh
        observer, readiness = self.observer, self.dispatcher.readiness()
        return ClusterFacts(
            model=self.model,
            version=__version__,
            missing=readiness.missing,
            serves=readiness.serves,
            store_up=self.membership.store_up,
            port=self.port,
            in_flight=observer.in_flight,
            queued=self.admission.waiting,
            minute=observer.lately.look(observer.clock.now_ns()),
            workers=self.membership.seen(),
            draining=self.dispatcher.draining_workers(),
            pairs=observer.lately.pairs,
        )
