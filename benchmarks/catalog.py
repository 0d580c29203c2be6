"""Every benchmark, in the order in which the page tells of them."""

from __future__ import annotations

from benchmarks import (
    bench_assign,
    bench_buckets,
    bench_checkpoint,
    bench_cold_start,
    bench_cuda_tests,
    bench_doctor,
    bench_end_to_end,
    bench_failures,
    bench_fit,
    bench_host,
    bench_import,
    bench_kernels,
    bench_out_of_memory,
    bench_overlap,
    bench_padding,
    bench_resize,
    bench_sampler,
    bench_stream,
    bench_transaction,
    bench_verified,
    bench_walk,
)
from benchmarks.program import Benchmark

__all__ = ["BENCHMARKS"]

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        bench_end_to_end.BENCHMARK,
        bench_host.BENCHMARK,
        bench_kernels.BENCHMARK,
        bench_resize.BENCHMARK,
        bench_out_of_memory.BENCHMARK,
        bench_overlap.BENCHMARK,
        bench_buckets.BENCHMARK,
        bench_stream.BENCHMARK,
        bench_cold_start.BENCHMARK,
        bench_padding.BENCHMARK,
        bench_fit.BENCHMARK,
        bench_sampler.BENCHMARK,
        bench_assign.BENCHMARK,
        bench_verified.BENCHMARK,
        bench_transaction.BENCHMARK,
        bench_checkpoint.BENCHMARK,
        bench_import.BENCHMARK,
        bench_walk.BENCHMARK,
        bench_failures.BENCHMARK,
        bench_doctor.BENCHMARK,
        bench_cuda_tests.BENCHMARK,
    )
}
"""By name; ``python -m benchmarks run NAME``."""
