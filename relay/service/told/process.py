"""Which program this is and what its process takes, for Prometheus."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Iterable
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "kvcs_relay_"
CERTIFICATE = "certificate_expiry_timestamp_seconds"

_PAGE = resource.getpagesize()


def version_of(distribution: str) -> str:
    """The version of an installed distribution, or that it is not installed."""
    from importlib import metadata  # it takes long, and few ask

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a checkout
        return "(not installed)"


class ProcessMetrics(Collector):
    """`build_info`, when the certificate expires, and `process_…` with the names that all programs
    have for them. What the operating system does not tell is left out."""

    def __init__(self, backend: str) -> None:
        """`backend` protects packets: python or native."""
        self.certificate: datetime | None = None
        """When the certificate that is served expires."""
        self._started = time.time()
        self._build = {
            "version": version_of("kvcs"),
            "python": platform.python_version(),
            "aioquic": version_of("aioquic"),
            "backend": backend,
        }

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily(PREFIX + "build", "Which program this is.", value=self._build)
        if self.certificate is not None:
            yield GaugeMetricFamily(
                PREFIX + CERTIFICATE,
                "When the certificate that is served expires, in seconds since 1970.",
                value=self.certificate.timestamp(),
            )
        yield from _process(self._started)


def _process(started: float) -> Iterable[Metric]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield CounterMetricFamily(
        "process_cpu_seconds",
        "CPU time of the process, in its own code and in the system's.",
        value=used.ru_utime + used.ru_stime,
    )
    yield GaugeMetricFamily(
        "process_start_time_seconds", "When it began, in seconds since 1970.", value=started
    )
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield GaugeMetricFamily("process_max_fds", "Files that it may have open.", value=most)
    if sys.platform != "linux":
        return
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            virtual, resident = (int(pages) * _PAGE for pages in file.read().split()[:2])
        files = len(os.listdir("/proc/self/fd"))
    except OSError:  # /proc is hidden, or there is no file left to open
        return
    yield GaugeMetricFamily("process_virtual_memory_bytes", "Addresses it has.", value=virtual)
    yield GaugeMetricFamily("process_resident_memory_bytes", "Memory it has.", value=resident)
    yield GaugeMetricFamily("process_open_fds", "Files it has open.", value=files)
