/* The Arrow C data interface: two structs that every Arrow implementation agrees on
 * (https://arrow.apache.org/docs/format/CDataInterface.html). We only read; the producer's capsule releases. */
#ifndef FTLAYER_ARROW_C_H
#define FTLAYER_ARROW_C_H

#include <stdint.h>
#include <string.h>

struct ArrowSchema {
    const char *format;
    const char *name;
    const char *metadata;
    int64_t flags;
    int64_t n_children;
    struct ArrowSchema **children;
    struct ArrowSchema *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length;
    int64_t null_count;
    int64_t offset;
    int64_t n_buffers;
    int64_t n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

static inline int bit_is_set(const uint8_t *bits, int64_t i) { return (bits[i >> 3] >> (i & 7)) & 1; }

/* The buffers of a message may begin anywhere, and C reads through a pointer to a wider type what is aligned alone:
 * values are copied, which compiles to the same instruction. */
#define DEFINE_READ(type, name)                                                                                        \
    static inline type name(const void *values, int64_t i) {                                                           \
        type value;                                                                                                    \
        memcpy(&value, (const char *)values + i * (int64_t)sizeof value, sizeof value);                                \
        return value;                                                                                                  \
    }
DEFINE_READ(int16_t, int16_at)
DEFINE_READ(int32_t, int32_at)
DEFINE_READ(int64_t, int64_at)
DEFINE_READ(float, float_at)
DEFINE_READ(double, double_at)
#undef DEFINE_READ

#endif
