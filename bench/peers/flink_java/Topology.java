// The `topology` benchmark's job in Flink with Java functions: Topology RECORDS PARALLELISM INTERVAL_MS DIRECTORY.
//
// INTERVAL_MS 0: no checkpoints. State is in the hash map backend, checkpoints go into DIRECTORY. Prints one JSON object:
// records, seconds from the first function's open to the last one's close, and the completed checkpoints.

import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.CheckpointListener;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

public final class Topology {
  private static final int KEYS = 10_000;
  private static final AtomicLong FIRST = new AtomicLong(Long.MAX_VALUE);
  private static final AtomicLong LAST = new AtomicLong(Long.MIN_VALUE);
  private static final AtomicLong CHECKPOINTS = new AtomicLong();

  private Topology() {}

  /** An id becomes itself with one of the keys. */
  static final class WithKey extends RichMapFunction<Long, Tuple2<Long, String>> {
    private transient String[] names;

    @Override
    public void open(OpenContext context) {
      names = new String[KEYS];
      for (int number = 0; number < KEYS; number++) {
        names[number] = String.format("key-%016d", number);
      }
      FIRST.accumulateAndGet(System.nanoTime(), Math::min);
    }

    @Override
    public Tuple2<Long, String> map(Long number) {
      return Tuple2.of(number, names[(int) (number % KEYS)]);
    }
  }

  /** Counts the records of a key. */
  static final class Count extends KeyedProcessFunction<String, Tuple2<Long, String>, Tuple2<String, Long>> {
    private transient ValueState<Long> count;

    @Override
    public void open(OpenContext context) {
      count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
    }

    @Override
    public void processElement(Tuple2<Long, String> record, Context context, Collector<Tuple2<String, Long>> out)
        throws Exception {
      Long before = count.value();
      long now = before == null ? 1 : before + 1;
      count.update(now);
      out.collect(Tuple2.of(record.f1, now));
    }
  }

  /** The last function: makes something of key and count. */
  static final class Last extends RichMapFunction<Tuple2<String, Long>, Tuple2<String, Long>>
      implements CheckpointListener {
    @Override
    public Tuple2<String, Long> map(Tuple2<String, Long> record) {
      return Tuple2.of(record.f0, record.f1 + 1);
    }

    @Override
    public void notifyCheckpointComplete(long checkpoint) {
      CHECKPOINTS.accumulateAndGet(checkpoint, Math::max);
    }

    @Override
    public void close() {
      LAST.accumulateAndGet(System.nanoTime(), Math::max);
    }
  }

  public static void main(String[] arguments) throws Exception {
    long records = Long.parseLong(arguments[0]);
    long interval = Long.parseLong(arguments[2]);
    Configuration options = new Configuration();
    options.setString("state.backend.type", "hashmap");
    options.setString("execution.checkpointing.dir", "file://" + arguments[3]);
    StreamExecutionEnvironment env = StreamExecutionEnvironment.getExecutionEnvironment(options);
    env.setParallelism(Integer.parseInt(arguments[1]));
    if (interval > 0) {
      env.enableCheckpointing(interval);
    }
    env.fromSource(new NumberSequenceSource(0, records - 1), WatermarkStrategy.noWatermarks(), "ids")
        .map(new WithKey())
        .returns(Types.TUPLE(Types.LONG, Types.STRING))
        .keyBy(record -> record.f1)
        .process(new Count())
        .returns(Types.TUPLE(Types.STRING, Types.LONG))
        .map(new Last())
        .returns(Types.TUPLE(Types.STRING, Types.LONG))
        .sinkTo(new DiscardingSink<>());
    env.execute("topology");
    double seconds = (LAST.get() - FIRST.get()) / 1e9;
    System.out.printf(
        "{\"records\": %d, \"seconds\": %.6f, \"checkpoints\": %d}%n", records, seconds, CHECKPOINTS.get());
  }
}
