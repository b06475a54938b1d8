/* KV between paged caches and the form in which it travels: all layers of a token range in one call, on one thread. */
#include <stdint.h>
#include <string.h>

#include "export.h"

/* One part of one layer: some of its heads. Strides are in bytes; the wire form is [tokens, heads, width]. */
typedef struct {
    int64_t base; /* address of block 0, first of the heads */
    int64_t block_stride, head_stride, token_stride, width_stride;
    int64_t heads, width;
    int64_t wire; /* address of the first token */
    int64_t first_run, num_runs;
} wire_piece;

/* Neighbouring blocks with `length` tokens each, from `offset` on; `at` is the first one's place in the wire form. */
typedef struct {
    int64_t block, count, offset, length, at;
} wire_run;

#define COPY_STRIDED(name, type)                                                                                       \
    static void name(char *cache, int64_t stride, char *wire, int64_t width, int32_t to_wire) {                        \
        for (int64_t i = 0; i < width; i++) {                                                                          \
            char *a = cache + i * stride, *b = wire + i * (int64_t)sizeof(type);                                       \
            if (to_wire) memcpy(b, a, sizeof(type));                                                                   \
            else memcpy(a, b, sizeof(type));                                                                           \
        }                                                                                                              \
    }
COPY_STRIDED(copy_4, uint32_t)
COPY_STRIDED(copy_2, uint16_t)
COPY_STRIDED(copy_1, uint8_t)

static void copy_head(const wire_piece *p, char *cache, char *wire, int64_t element, int32_t to_wire) {
    if (p->width_stride == element) {
        if (to_wire) memcpy(wire, cache, (size_t)(p->width * element));
        else memcpy(cache, wire, (size_t)(p->width * element));
    } else if (element == 4) {
        copy_4(cache, p->width_stride, wire, p->width, to_wire);
    } else if (element == 2) {
        copy_2(cache, p->width_stride, wire, p->width, to_wire);
    } else {
        copy_1(cache, p->width_stride, wire, p->width, to_wire);
    }
}

EXPORT void quire_kv_wire(const wire_piece *pieces, int64_t num_pieces, const wire_run *runs, int64_t element,
                          int32_t to_wire) {
    for (const wire_piece *p = pieces; p < pieces + num_pieces; p++) {
        int64_t vector = p->width * element;
        for (const wire_run *r = runs + p->first_run; r < runs + p->first_run + p->num_runs; r++) {
            for (int64_t b = 0; b < r->count; b++) {
                char *block = (char *)(p->base + (r->block + b) * p->block_stride + r->offset * p->token_stride);
                char *wire = (char *)(p->wire + (r->at + b * r->length) * p->heads * vector);
                for (int64_t h = 0; h < p->heads; h++)
                    for (int64_t t = 0; t < r->length; t++)
                        copy_head(p, block + h * p->head_stride + t * p->token_stride,
                                  wire + (t * p->heads + h) * vector, element, to_wire);
            }
        }
    }
}
