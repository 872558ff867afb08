"""The `topology` benchmark's job in PyFlink 2: ``python -m bench.peers.pyflink_job process|thread RECORDS``.

Prints one JSON object: records, seconds (of the job as Flink's own result reports it). Parallelism 2, tuned
with a large Python state cache and large bundles.
"""

from __future__ import annotations

import json
import sys

from pyflink.common import Configuration, Types
from pyflink.common.watermark_strategy import WatermarkStrategy
from pyflink.datastream import RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.number_seq import NumberSequenceSource
from pyflink.datastream.functions import KeyedProcessFunction
from pyflink.datastream.state import ValueStateDescriptor

from bench.peers.functions import last, with_key


class _Count(KeyedProcessFunction):
    def open(self, runtime_context: RuntimeContext) -> None:
        self._count = runtime_context.get_state(ValueStateDescriptor("count", Types.LONG()))

    def process_element(self, value, ctx):  # type: ignore[no-untyped-def]
        count = (self._count.value() or 0) + 1
        self._count.update(count)
        yield value[1], count


def main(mode: str, records: int) -> None:
    options = Configuration()
    options.set_string("python.execution-mode", mode)
    options.set_string("python.state.cache-size", "20000")
    options.set_string("python.fn-execution.bundle.size", "100000")
    options.set_string("python.fn-execution.bundle.time", "1000")
    options.set_string("python.executable", sys.executable)
    env = StreamExecutionEnvironment.get_execution_environment(options)
    env.set_parallelism(2)
    ids = env.from_source(NumberSequenceSource(0, records - 1), WatermarkStrategy.no_watermarks(), "ids")
    keyed = ids.map(with_key, Types.TUPLE([Types.LONG(), Types.STRING()])).key_by(
        lambda record: record[1], Types.STRING()
    )
    counted = keyed.process(_Count(), Types.TUPLE([Types.STRING(), Types.LONG()]))
    done = counted.map(last, Types.TUPLE([Types.STRING(), Types.LONG()]))
    done.filter(lambda record: False).print()
    result = env.execute("topology")
    print(json.dumps({"records": records, "seconds": result.get_net_runtime() / 1_000}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
