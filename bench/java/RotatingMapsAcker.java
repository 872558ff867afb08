import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.ByteOrder;
import java.nio.LongBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;

/**
 * The peer of the acker benchmark: ack values in a list of hash maps, the way an acker in Java keeps
 * them. A look-up asks the maps from the newest to the oldest; an update puts the value into the newest
 * and takes it out of the others, so that it expires last.
 *
 * <p>Arguments: a file of roots, a file of (root, value) pairs (little-endian 64-bit), pairs in a batch,
 * rounds. Prints the nanoseconds of CPU time that each batch took.
 */
public final class RotatingMapsAcker {
    private static final int BUCKETS = 3;

    /** An ack value that is updated in place. */
    private static final class AckValue {
        long value;
    }

    private final Deque<Map<Long, AckValue>> buckets = new ArrayDeque<>();

    private RotatingMapsAcker() {
        for (int i = 0; i < BUCKETS; i++) {
            buckets.addFirst(new HashMap<>());
        }
    }

    private AckValue get(Long root) {
        for (Map<Long, AckValue> bucket : buckets) {
            AckValue found = bucket.get(root);
            if (found != null) {
                return found;
            }
        }
        return null;
    }

    private void put(Long root, AckValue value) {
        Iterator<Map<Long, AckValue>> all = buckets.iterator();
        all.next().put(root, value);
        while (all.hasNext()) {
            all.next().remove(root);
        }
    }

    private void remove(Long root) {
        for (Map<Long, AckValue> bucket : buckets) {
            if (bucket.remove(root) != null) {
                return;
            }
        }
    }

    private void register(Long root, long value) {
        AckValue entry = new AckValue();
        entry.value = value;
        put(root, entry);
    }

    /** Opens a new bucket; nothing has expired yet, as the oldest one is still empty. */
    private void rotate() {
        if (!buckets.removeLast().isEmpty()) {
            throw new IllegalStateException("a root expired while the benchmark was set up");
        }
        buckets.addFirst(new HashMap<>());
    }

    /** Returns whether the root completed. */
    private boolean xor(Long root, long value) {
        AckValue entry = get(root);
        if (entry == null) {
            return false;
        }
        entry.value ^= value;
        if (entry.value == 0) {
            remove(root);
            return true;
        }
        put(root, entry);
        return false;
    }

    private static long[] read(String path) throws IOException {
        try (FileChannel channel = FileChannel.open(Path.of(path))) {
            LongBuffer numbers =
                    channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size())
                            .order(ByteOrder.LITTLE_ENDIAN)
                            .asLongBuffer();
            long[] copy = new long[numbers.remaining()];
            numbers.get(copy);
            return copy;
        }
    }

    public static void main(String[] arguments) throws IOException {
        long[] roots = read(arguments[0]);
        long[] events = read(arguments[1]);
        int batch = Integer.parseInt(arguments[2]);
        int rounds = Integer.parseInt(arguments[3]);
        RotatingMapsAcker acker = new RotatingMapsAcker();
        // Pending roots are of different ages: a third of them in each of the three maps.
        for (int i = 0; i < roots.length; i++) {
            if (i == roots.length / BUCKETS || i == 2 * (roots.length / BUCKETS)) {
                acker.rotate();
            }
            acker.register(roots[i], roots[i]);
        }
        ThreadMXBean clock = ManagementFactory.getThreadMXBean();
        int completed = 0;
        StringBuilder timings = new StringBuilder();
        for (int round = 0; round < rounds; round++) {
            for (int first = 0; first < events.length; first += 2 * batch) {
                long start = clock.getCurrentThreadCpuTime();
                for (int i = first; i < first + 2 * batch; i += 2) {
                    completed += acker.xor(events[i], events[i + 1]) ? 1 : 0;
                }
                timings.append(clock.getCurrentThreadCpuTime() - start).append('\n');
            }
        }
        if (completed != 0) {
            throw new IllegalStateException(completed + " roots completed, though no value should come to 0");
        }
        System.out.print(timings);
    }
}
