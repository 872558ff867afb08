/* MurmurHash3 x86_32 (Austin Appleby, public domain, 2011) as Spark applies it to the values of a row.
 *
 * Spark differs from the published function in one thing, seen by comparing with its `hash()`: the bytes after
 * the last whole word are each mixed in as a word of their own, sign-extended. */
#ifndef FTLAYER_MURMUR3_H
#define FTLAYER_MURMUR3_H

#include <stdint.h>
#include <string.h>

static inline uint32_t rotate_left(uint32_t x, int bits) { return (x << bits) | (x >> (32 - bits)); }

static inline uint32_t murmur_word(uint32_t state, uint32_t word) {
    word = rotate_left(word * UINT32_C(0xCC9E2D51), 15) * UINT32_C(0x1B873593);
    return rotate_left(state ^ word, 13) * 5 + UINT32_C(0xE6546B64);
}

static inline uint32_t murmur_finish(uint32_t state, uint32_t length) {
    state ^= length;
    state = (state ^ (state >> 16)) * UINT32_C(0x85EBCA6B);
    state = (state ^ (state >> 13)) * UINT32_C(0xC2B2AE35);
    return state ^ (state >> 16);
}

static inline uint32_t murmur_int(uint32_t seed, int32_t value) {
    return murmur_finish(murmur_word(seed, (uint32_t)value), 4);
}

static inline uint32_t murmur_long(uint32_t seed, int64_t value) {
    uint64_t bits = (uint64_t)value;
    return murmur_finish(murmur_word(murmur_word(seed, (uint32_t)bits), (uint32_t)(bits >> 32)), 8);
}

static inline uint32_t murmur_bytes(uint32_t seed, const uint8_t *bytes, int64_t length) {
    int64_t whole = length & ~INT64_C(3), i = 0;
    for (; i < whole; i += 4) {
        uint32_t word;
        memcpy(&word, bytes + i, sizeof word);
        seed = murmur_word(seed, word);
    }
    for (; i < length; i++) seed = murmur_word(seed, (uint32_t)(int32_t)(int8_t)bytes[i]);
    return murmur_finish(seed, (uint32_t)length);
}

#endif
