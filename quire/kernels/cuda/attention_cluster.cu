// Decode attention of few sequences with some hundred keys on Hopper: its time is latency. Norm, rotation and the KV
// write are part of it.
//
// A cluster of blocks has a sequence and a KV head, with all query heads of that KV head. Keys are cut into tiles of 16;
// a warp has every SOURCES-th of them. Its first keys and values come to registers before the previous kernel has ended,
// as the tensor cores want them; warps meet nobody until they are done, and then once: each sends every block those
// features of its sums that the block joins, straight into its shared memory.
//
// Which features an instruction multiplies at once is free, as long as both sides agree. So a lane's part of a head is
// four runs of eight features, a load each, with both numbers of each pair that is rotated; and its values are two runs
// of eight features of four keys, which become operands by moving halves of words. Instructions multiply eight query
// heads: behind those that there are comes the step's own key, which is normed and rotated beside them and goes from
// there to its place among the keys.
//
// Compiled at run time (attention_cluster.py). Defined in front of this file: CLUSTER (blocks), WARPS (of a block), KV
// (heads), GROUP (query heads of each), PAGE (keys of a block of the cache), REGISTERS (of a thread), NORM, EARLY.

constexpr int DIM = 128, KEYS = 16, THREADS = 32 * WARPS;
constexpr int SOURCES = CLUSTER * WARPS;
constexpr int SLICE = DIM / CLUSTER;  // features of a query head that a block joins
constexpr int SPREAD = 4, TURNS = (SOURCES + SPREAD - 1) / SPREAD;  // lanes that join one of them together
constexpr int PAIRS = (GROUP + 1) / 2;
constexpr int PADDED = GROUP * SLICE + 8;  // neighbouring sources lie in different banks

static_assert(GROUP < 8 && PAGE % KEYS == 0 && CLUSTER <= 8, "no such heads or pages");

struct Memory {
    float sums[SOURCES][PADDED];
    float levels[SOURCES][4 * PAIRS];  // of each query head: the highest score, and the sum of weights under it
};

struct Lane {
    int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
};

// A lane's part of a head: features 8 * member + 32 * run + 0 to 7.
struct Part {
    uint4 runs[4];
};

// ---- norm and rotation

// Of a head's first half, and of its second one: features of the lane's first two runs, and those that are turned with
// them.
struct Halves {
    float4 first[4], second[4];
};

__device__ __forceinline__ Halves load_halves(const float* numbers) {
    Halves found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* place = numbers + 8 * Lane().member + i / 2 * 32 + i % 2 * 4;
        found.first[i] = load_floats(place), found.second[i] = load_floats(place + DIM / 2);
    }
    return found;
}

__device__ __forceinline__ u32 word_of(const uint4& words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

__device__ __forceinline__ float number_of(const float4& numbers, int index) {
    return index == 0 ? numbers.x : index == 1 ? numbers.y : index == 2 ? numbers.z : numbers.w;
}

__device__ __forceinline__ float feature_of(const Part& part, int run, int index) {
    u32 word = word_of(part.runs[run], index / 2);
    return index % 2 ? high_of(word) : low_of(word);
}

__device__ __forceinline__ float scale_of(const Part& head, float eps) {
    float squares[4] = {};
#pragma unroll
    for (int run = 0; run < 4; ++run)
#pragma unroll
        for (int i = 0; i < 8; ++i) squares[run] += feature_of(head, run, i) * feature_of(head, run, i);
    float square = squares[0] + squares[1] + (squares[2] + squares[3]);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    return rsqrtf(square / DIM + eps);
}

// `angles`: cosines, and sines.
__device__ __forceinline__ void turn(Part& head, const Halves& gains, const Halves& angles, float eps) {
    float scale = NORM ? scale_of(head, eps) : 1.0f;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
        u32 low[4], high[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            float turned[2][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int i = 2 * word + half, four = 2 * run + i / 4;
                float a = feature_of(head, run, i), b = feature_of(head, run + 2, i);
                if (NORM) a *= scale * number_of(gains.first[four], i % 4);
                if (NORM) b *= scale * number_of(gains.second[four], i % 4);
                float cosine = number_of(angles.first[four], i % 4), sine = number_of(angles.second[four], i % 4);
                turned[half][0] = a * cosine - b * sine, turned[half][1] = b * cosine + a * sine;
            }
            low[word] = packed(turned[0][0], turned[1][0]), high[word] = packed(turned[0][1], turned[1][1]);
        }
        head.runs[run] = {low[0], low[1], low[2], low[3]};
        head.runs[run + 2] = {high[0], high[1], high[2], high[3]};
    }
}

// Of what the previous kernel wrote.
__device__ __forceinline__ Part load_head(const u16* head, bool real) {
    Part found;
#pragma unroll
    for (int run = 0; run < 4; ++run) found.runs[run] = load_row(head + 8 * Lane().member + 32 * run, real);
    return found;
}

// ---- the keys of a sequence

struct Span {
    int first, newest;  // the first key that is seen, and the step's own
    int begin, tiles;

    __device__ __forceinline__ Span(int length, int window) {
        newest = length - 1, first = length > window ? length - window : 0;
        begin = first / KEYS, tiles = newest / KEYS - begin + 1;
    }
    __device__ __forceinline__ int position(int tile, int key) const { return (begin + tile) * KEYS + key; }
    __device__ __forceinline__ bool is_old(int position) const { return position >= first && position < newest; }
};

// The block of the cache that has a tile. It is read a turn before its keys, which would wait for it.
__device__ __forceinline__ int block_of(const Span& span, const int* table, int tile) {
    return tile < span.tiles ? load_number(table + span.position(tile, 0) / PAGE) : 0;
}

// Where a tile lies in the cache.
__device__ __forceinline__ long long place_of(const Span& span, int block, int tile, int head) {
    return (((long long)block * KV + head) * PAGE + span.position(tile, 0) % PAGE) * DIM;
}

// Two keys of a tile, lane's group and the eighth after it, and two runs of the values of four.
struct Tile {
    Part keys[2];
    uint4 values[4][2];

    __device__ __forceinline__ static int valued(int index) {
        return 2 * Lane().member + index % 2 + index / 2 * 8;
    }

    __device__ __forceinline__ void load_keys(const u16* cache, const Span& span, int tile) {
        Lane lane;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int key = lane.group + 8 * i;
            bool real = span.is_old(span.position(tile, key));
#pragma unroll
            for (int run = 0; run < 4; ++run)
                keys[i].runs[run] = load_early(cache + key * DIM + 8 * lane.member + 32 * run, real);
        }
    }

    __device__ __forceinline__ void load_values(const u16* cache, const Span& span, int tile) {
        Lane lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bool real = span.is_old(span.position(tile, valued(i)));
#pragma unroll
            for (int half = 0; half < 2; ++half)
                values[i][half] = load_early(cache + valued(i) * DIM + DIM / 2 * half + 8 * lane.group, real);
        }
    }

    // The step's own, which are not in the cache yet: the value as the previous kernel left it, and the key from behind
    // the query heads.
    __device__ __forceinline__ void take_value(const u16* value, int place) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (valued(i) == place)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    values[i][half] = load_row(value + DIM / 2 * half + 8 * Lane().group, true);
    }

    __device__ __forceinline__ void take_key(const Part& heads, int place) {
        Lane lane;
#pragma unroll
        for (int run = 0; run < 4; ++run) {
            uint4 found = from_lane(heads.runs[run], 4 * GROUP + lane.member);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (lane.group + 8 * i == place) keys[i].runs[run] = found;
        }
    }
};

// ---- sums of a warp

// Of query heads 2 * member and the next one. sums[i]: numbers 0 and 1 of an even feature, 2 and 3 of the next one.
struct Sums {
    float numbers[8][4] = {};
    float peak[2] = {lowest(), lowest()}, total[2] = {};

    // Scores of the lane's two keys under its two query heads, seen or not.
    __device__ __forceinline__ void score(float (&scores)[4], const Tile& tile, const Part& query, const Span& span,
                                          int number, float scale) {
        float sums[2][4] = {};
#pragma unroll
        for (int run = 0; run < 4; ++run) {
            const uint4 &one = tile.keys[0].runs[run], &other = tile.keys[1].runs[run], &asked = query.runs[run];
            multiply(sums[run % 2], one.x, other.x, one.y, other.y, asked.x, asked.y);
            multiply(sums[run % 2], one.z, other.z, one.w, other.w, asked.z, asked.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int position = span.position(number, Lane().group + i / 2 * 8);
            bool seen = position >= span.first && position <= span.newest;
            scores[i] = seen ? (sums[0][i] + sums[1][i]) * scale : lowest();
        }
    }

    // Scores become weights; what is summed so far shrinks to the new peak.
    __device__ __forceinline__ void weigh(float (&scores)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float higher = fmaxf(scores[i], scores[i + 2]);
            higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 4));
            higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 8));
            higher = fmaxf(fmaxf(higher, __shfl_xor_sync(~0u, higher, 16)), peak[i]);
            float shrink = power_of_two(peak[i] - higher);
            scores[i] = power_of_two(scores[i] - higher), scores[i + 2] = power_of_two(scores[i + 2] - higher);
            total[i] = total[i] * shrink + (scores[i] + scores[i + 2]);
            peak[i] = higher;
#pragma unroll
            for (int part = 0; part < 8; ++part) numbers[part][i] *= shrink, numbers[part][i + 2] *= shrink;
        }
    }

    __device__ __forceinline__ void add(const float (&weights)[4], const Tile& tile) {
        u32 low = transposed(packed(weights[0], weights[1])), high = transposed(packed(weights[2], weights[3]));
#pragma unroll
        for (int part = 0; part < 8; ++part) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = word_of(tile.values[i][part / 4], part % 4);
            multiply(numbers[part], low_halves(words[0], words[1]), high_halves(words[0], words[1]),
                     low_halves(words[2], words[3]), high_halves(words[2], words[3]), low, high);
        }
    }

    // To each block the features that it joins: a run of eight of each half for every lane group.
    __device__ __forceinline__ void send(Memory& memory, int source) {
        Lane lane;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] += __shfl_xor_sync(~0u, total[i], 4);
            total[i] += __shfl_xor_sync(~0u, total[i], 8);
            total[i] += __shfl_xor_sync(~0u, total[i], 16);
        }
        if (lane.member >= PAIRS) return;
        if (lane.group < CLUSTER)
            store_at(lane.group, &memory.levels[source][4 * lane.member], {peak[0], total[0], peak[1], total[1]});
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int query = 2 * lane.member + i;
            if (query >= GROUP) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                constexpr int OF_BLOCK = 8 / CLUSTER;  // lane groups of a block
                int block = lane.group / OF_BLOCK, place = lane.group % OF_BLOCK * 16 + 8 * half;
                float* to = &memory.sums[source][query * SLICE + place];
                const auto& found = &numbers[4 * half];
                store_at(block, to, {found[0][i], found[0][i + 2], found[1][i], found[1][i + 2]});
                store_at(block, to + 4, {found[2][i], found[2][i + 2], found[3][i], found[3][i + 2]});
            }
        }
    }
};

// ---- what all warps of a cluster found

// Which feature the block has at a place of its slice.
__device__ __forceinline__ int feature_at(int block, int place) {
    return place / 8 % 2 * (DIM / 2) + block * (SLICE / 2) + place / 16 * 8 + place % 8;
}

__device__ __forceinline__ void join(const Memory& memory, int live, int block, u16* out) {
    for (int output = threadIdx.x / SPREAD; output < GROUP * SLICE; output += THREADS / SPREAD) {
        int query = output / SLICE, begin = threadIdx.x % SPREAD;
        float levels[TURNS], peak = lowest(), total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int source = begin + turn * SPREAD;
            levels[turn] = source < live ? memory.levels[source][2 * query] : lowest();
            peak = fmaxf(peak, levels[turn]);
        }
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int source = begin + turn * SPREAD;
            if (source >= live) break;
            float share = power_of_two(levels[turn] - peak);
            total += share * memory.levels[source][2 * query + 1];
            sum += share * memory.sums[source][output];
        }
        total += __shfl_xor_sync(~0u, total, 1), sum += __shfl_xor_sync(~0u, sum, 1);
        total += __shfl_xor_sync(~0u, total, 2), sum += __shfl_xor_sync(~0u, sum, 2);
        if (begin == 0) out[query * DIM + feature_at(block, output % SLICE)] = (u16)packed(sum / total, 0.0f);
    }
}

// ---- the kernel

struct Step {
    const u16* qkv;  // the sequence's row
    u16 *k_cache, *v_cache;
    const int* table;
    const float* rope;
    const float *q_gains, *k_gains;
    float eps, scale;
    int head;
};

// The query heads, and behind them the step's own key, raw.
__device__ __forceinline__ Part load_heads(const Step& step, bool owner) {
    Lane lane;
    bool key = lane.group == GROUP;
    int number = key ? KV * GROUP + step.head : step.head * GROUP + lane.group;
    return load_head(step.qkv + number * DIM, lane.group < GROUP || (key && owner));
}

// The step's own key and value to their place in the cache, by the lanes that have them.
__device__ __forceinline__ void keep(const Step& step, const Part& heads, const Tile& tile, int key, long long place) {
    Lane lane;
    if (lane.group == GROUP) {
#pragma unroll
        for (int run = 0; run < 4; ++run)
            *(uint4*)(step.k_cache + place + 8 * lane.member + 32 * run) = heads.runs[run];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (Tile::valued(i) == key)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *(uint4*)(step.v_cache + place + DIM / 2 * half + 8 * lane.group) = tile.values[i][half];
}

// One warp's tiles, from its first one on, until its sums are sent.
__device__ __forceinline__ void attend(const Step& step, const Span& span, Memory& memory, int source) {
    Tile tile;
    int last = span.tiles - 1, own = span.newest % KEYS;
    const u16* value = step.qkv + (KV * (GROUP + 1) + step.head) * DIM;
    long long place = place_of(span, block_of(span, step.table, source), source, step.head);
    int later = block_of(span, step.table, source + SOURCES);
    tile.load_keys(step.k_cache + place, span, source);
    tile.load_values(step.v_cache + place, span, source);
    Halves angles = load_halves(step.rope + (long long)span.newest * DIM), gains = {};
    if (NORM) gains = load_halves(Lane().group == GROUP ? step.k_gains : step.q_gains);
    launch_next_kernel();
    wait_for_previous_kernel();
    Part heads = load_heads(step, last % SOURCES == source);
    if (source == last) tile.take_value(value, own);
    turn(heads, gains, angles, step.eps);
    Sums sums;
    for (int number = source;;) {
        if (number == last) tile.take_key(heads, own);
        float weights[4];
        sums.score(weights, tile, heads, span, number, step.scale);
        int next = number + SOURCES;
        if (next <= last) {
            place = place_of(span, later, next, step.head);
            later = block_of(span, step.table, next + SOURCES);
            tile.load_keys(step.k_cache + place, span, next);
        }
        sums.weigh(weights);
        sums.add(weights, tile);
        if (next > last) break;
        tile.load_values(step.v_cache + place, span, next);
        if (next == last) tile.take_value(value, own);
        number = next;
    }
    wait_for_cluster();  // every block has begun: its memory may be written to
    sums.send(memory, source);
    __syncwarp();
    arrive_at_cluster();  // before what goes to the cache: the others would wait for it
    if (last % SOURCES == source) keep(step, heads, tile, own, place + own * DIM);
}

extern "C" __global__ void __maxnreg__(REGISTERS)
    cluster_decode(const u16* qkv, u16* k_cache, u16* v_cache, const int* tables, const int* rows, const int* lengths,
                   const float* rope, const float* q_gains, const float* k_gains, u16* out, float eps, float scale,
                   int window, int q_stride, int table_stride) {
    int block = blockIdx.x % CLUSTER, head = blockIdx.x / CLUSTER % KV, seq = blockIdx.x / (CLUSTER * KV);
    int row = rows ? load_number(rows + seq) : seq, length = load_number(lengths + seq);
    if (length <= 0) {
        launch_next_kernel();
        wait_for_previous_kernel();
        return;
    }
    arrive_at_cluster();
    Span span(length, window);
    Memory& memory = *(Memory*)block_memory();
    Step step = {qkv + (long long)seq * q_stride, k_cache, v_cache, tables + (long long)(row < 0 ? 0 : row) * table_stride,
                 rope, q_gains, k_gains, eps, scale, head};  // fmt: skip
    int source = threadIdx.x / 32 * CLUSTER + block;  // the first tiles are of as many blocks as there are
    if (source < span.tiles) {
        attend(step, span, memory, source);
    } else {
        launch_next_kernel();
        wait_for_previous_kernel();
        wait_for_cluster();
        arrive_at_cluster();
    }
    wait_for_cluster();
    join(memory, span.tiles < SOURCES ? span.tiles : SOURCES, block,
         out + ((long long)seq * KV + head) * GROUP * DIM);
}
