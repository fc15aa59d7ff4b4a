// Attention in bf16 and f16 on tensor cores.
//
// Four warps do a tile of 64 queries by 64 keys, each 16 rows of it. What a block owns lies in registers as fragments of A; the
// other side lies in shared memory, as it is and with neighbouring rows in a word (mma.cuh says what a lane holds). Scores and
// sums are f32; weights and slopes are rounded to the type before they are multiplied.

struct Eight {
    alignas(16) u16 x[8];
};

// 64 rows: by row, and by pairs of rows. The ends of rows keep lanes in banks of their own.
template <int WIDTH> struct ByRow {
    alignas(16) u16 x[64][WIDTH + 8];
};
template <int WIDTH> struct ByPair {
    alignas(16) u32 x[32][WIDTH + 8];
};

// Whether rows of a head are whole eights of 16 bits.
DEVICE bool by_eights(const Operand& o, i64 head, int width) {
    return o.stride[3] == 1 && ((u64)o.data + 2 * head) % 16 == 0 && o.stride[2] % 8 == 0 && width % 8 == 0;
}

// Eight columns of a row, zeros beyond the head's end.
DEVICE Eight eight(const Operand& o, i64 head, bool whole, int row, int rows, int column, int width) {
    Eight all = {};
    if (row >= rows || column >= width) return all;
    const u16* data = (const u16*)o.data + head + row * o.stride[2];
    if (whole) return *(const Eight*)(data + column);
    UNROLL for (int j = 0; j < 8; j++)
        if (column + j < width) all.x[j] = data[(column + j) * o.stride[3]];
    return all;
}

template <int WIDTH> DEVICE void fetch(ByRow<WIDTH>& to, const Operand& o, i64 head, int first, int rows, int width) {
    bool whole = by_eights(o, head, width);
    const int EIGHTS = WIDTH / 8;
    TWICE for (int at = threadIdx.y * 32 + threadIdx.x; at < 64 * EIGHTS; at += 128) {
        int row = at / EIGHTS, column = at % EIGHTS * 8;
        *(Eight*)&to.x[row][column] = eight(o, head, whole, first + row, rows, column, width);
    }
}

template <int WIDTH> DEVICE void fetch(ByPair<WIDTH>& to, const Operand& o, i64 head, int first, int rows, int width) {
    bool whole = by_eights(o, head, width);
    const int EIGHTS = WIDTH / 8;
    ONCE for (int at = threadIdx.y * 32 + threadIdx.x; at < 32 * EIGHTS; at += 128) {
        int pair = at / EIGHTS, column = at % EIGHTS * 8, row = first + 2 * pair;
        Eight upper = eight(o, head, whole, row, rows, column, width), lower = eight(o, head, whole, row + 1, rows, column, width);
        UNROLL for (int j = 0; j < 8; j++) to.x[pair][column + j] = upper.x[j] | (u32)lower.x[j] << 16;
    }
}

// Fragments of A: this warp's 16 rows from `first` on, 16 columns in each.
template <int STEPS> DEVICE void own_rows(u32 (&a)[STEPS][4], const Operand& o, i64 head, int first, int rows, int width) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    UNROLL for (int s = 0; s < STEPS; s++) UNROLL for (int i = 0; i < 4; i++) {
        int row = first + g + 8 * (i % 2), column = 16 * s + 2 * t + 8 * (i / 2);
        const u16* data = (const u16*)o.data + head + row * o.stride[2];
        u32 low = row < rows && column < width ? data[column * o.stride[3]] : 0;
        u32 high = row < rows && column + 1 < width ? data[(column + 1) * o.stride[3]] : 0;
        a[s][i] = low | high << 16;
    }
}

// c += own rows times the transpose of TILES times eight rows from `first` on.
template <int TYPE, int TILES, int STEPS, int WIDTH>
DEVICE void dots(float (&c)[TILES][4], const u32 (&a)[STEPS][4], const ByRow<WIDTH>& b, int first) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int s = 0; s < STEPS; s++) {
        const u16* row = &b.x[first + 8 * j + g][16 * s + 2 * t];
        multiply<TYPE>(c[j], a[s], *(const u32*)row, *(const u32*)(row + 8));
    }
}

// c += weights, rounded, times as many rows from `first` on.
template <int TYPE, int TILES, int COLUMNS, int WIDTH>
DEVICE void weigh(float (&c)[COLUMNS][4], const float (&weights)[TILES][4], const ByPair<WIDTH>& b, int first) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    UNROLL for (int s = 0; s < TILES / 2; s++) {
        const float(&left)[4] = weights[2 * s];
        const float(&right)[4] = weights[2 * s + 1];
        u32 a[4] = {pack<TYPE>(left[0], left[1]), pack<TYPE>(left[2], left[3]), pack<TYPE>(right[0], right[1]), pack<TYPE>(right[2], right[3])};
        UNROLL for (int j = 0; j < COLUMNS; j++) {
            int pair = first / 2 + 8 * s + t;
            multiply<TYPE>(c[j], a, b.x[pair][8 * j + g], b.x[pair + 4][8 * j + g]);
        }
    }
}

// This warp's 16 rows of results.
template <int TYPE, int COLUMNS> DEVICE void put(const Operand& o, i64 head, int first, int rows, int width, const float (&c)[COLUMNS][4]) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    UNROLL for (int j = 0; j < COLUMNS; j++) UNROLL for (int i = 0; i < 2; i++) {
        int row = first + g + 8 * i, column = 8 * j + 2 * t;
        if (row >= rows || column >= width) continue;
        u16* data = (u16*)o.data + head + row * o.stride[2];
        u32 both = pack<TYPE>(c[j][2 * i], c[j][2 * i + 1]);
        data[column * o.stride[3]] = (u16)both;
        if (column + 1 < width) data[(column + 1) * o.stride[3]] = (u16)(both >> 16);
    }
}

// A bit for each of so many elements that a function holds for; not unrolled, which would take registers.
template <int TILES, class F> DEVICE u32 bits(F holds) {
    u32 all = 0;
    ONCE for (int at = 0; at < 4 * TILES; at++) all |= (u32)holds(at / 4, at % 4) << at;
    return all;
}

// Products to scores: minus infinity where a key is not seen. `query` and `key` are functions of an element of the fragments,
// [first, end) are those of the tile.
template <int TILES, class Q, class K>
DEVICE void scores(const Attention& p, int b, int h, const int (&queries)[2], const int (&keys)[2], Q query, K key, float (&s)[TILES][4]) {
    bool masked = !p.bias.number && !is_real(p.bias.dtype), added = !p.bias.number && !masked;
    i64 head = head_of(p.bias, b, h);
    auto place = [&](int j, int i) { return head + query(j, i) * p.bias.stride[2] + key(j, i) * p.bias.stride[3]; };
    u32 open = 0xffffffff;
    if (masked || queries[1] > p.queries || keys[1] > p.keys || (p.causal && keys[1] - 1 > queries[0]))
        open = bits<TILES>([&](int j, int i) {
            int at = query(j, i), of = key(j, i);
            if (at >= p.queries || of >= p.keys || (p.causal && of > at)) return false;
            return !masked || ((const u8*)p.bias.data)[place(j, i)] != 0;
        });
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < 4; i++) {
        float x = s[j][i] * p.scale;
        bool seen = open >> (4 * j + i) & 1;
        if (added && seen) x += load_real(p.bias.data, p.bias.dtype, place(j, i));
        s[j][i] = seen ? x : -INF;
    }
}

// Which weights dropout keeps.
template <int TILES, class Q, class K> DEVICE u32 kept_of(const Attention& p, int b, int h, Q query, K key) {
    if (!p.dropout) return 0xffffffff;
    u64 row = ((u64)b * p.heads + h) * p.queries;
    return bits<TILES>([&](int j, int i) { return keep(p.random, (row + query(j, i)) * p.keys + key(j, i)); });
}

template <int TYPE, int WIDTH> DEVICE void attend(const Attention& p, ByRow<WIDTH>& keys, ByPair<WIDTH>& values) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    Owned tile_of = owned(p.queries, p.heads, 64);
    int first = tile_of.first, own = first + 16 * threadIdx.y, h = tile_of.head, b = tile_of.batch;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    u32 q[WIDTH / 16][4];
    own_rows(q, p.q, head_of(p.q, b, h), own, p.queries, p.width);
    float acc[WIDTH / 8][4] = {}, most[2] = {-INF, -INF}, sum[2] = {};
    int end = seen(p, first + 64);
    ONCE for (int from = 0; from < end; from += 64) {
        fetch(keys, p.k, keys_of, from, p.keys, p.width);
        fetch(values, p.v, values_of, from, p.keys, p.value_width);
        SYNC();
        float s[8][4] = {};
        dots<TYPE>(s, q, keys, 0);
        auto query = [&](int, int i) { return own + g + 8 * (i / 2); };
        auto key = [&](int j, int i) { return from + 8 * j + 2 * t + i % 2; };
        scores(p, b, h, {first, first + 64}, {from, from + 64}, query, key, s);
        u32 kept = kept_of<8>(p, b, h, query, key);
        float factor = p.dropout ? p.factor : 1.0f;
        UNROLL for (int r = 0; r < 2; r++) {
            float m = most[r];
            UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) m = larger_of(m, s[j][i]);
            m = larger_of(m, OTHER_LANE(m, 1));
            m = larger_of(m, OTHER_LANE(m, 2));
            float base = m == -INF ? 0.0f : m, shrink = expf((most[r] == -INF ? base : most[r]) - base);
            most[r] = m;
            sum[r] *= shrink;
            UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) {
                s[j][i] = expf(s[j][i] - base);
                sum[r] += s[j][i];
                s[j][i] = kept >> (4 * j + i) & 1 ? s[j][i] * factor : 0.0f;
            }
            UNROLL for (int j = 0; j < WIDTH / 8; j++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) acc[j][i] *= shrink;
        }
        weigh<TYPE>(acc, s, values, 0);
        SYNC();
    }
    UNROLL for (int r = 0; r < 2; r++) {
        sum[r] += OTHER_LANE(sum[r], 1);
        sum[r] += OTHER_LANE(sum[r], 2);
        float by = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
        UNROLL for (int j = 0; j < WIDTH / 8; j++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) acc[j][i] *= by;
        int query = own + g + 8 * r;
        if (t == 0 && query < p.queries && !p.sums.number)
            store<float>(p.sums, head_of(p.sums, b, h) + query * p.sums.stride[2], (most[r] == -INF ? 0.0f : most[r]) + logf(sum[r]));
    }
    put<TYPE>(p.out, head_of(p.out, b, h), own, p.queries, p.value_width, acc);
}

// Of a query: the logarithm of the sum, and the dot product of result and its gradient.
struct Facts {
    float log, delta;
};
DEVICE Facts facts(const Attention& p, int b, int h, int query) {
    if (query >= p.queries) return Facts{-INF, 0.0f};
    return Facts{load<float>(p.sums, head_of(p.sums, b, h) + query * p.sums.stride[2]), p.delta[((i64)b * p.heads + h) * p.queries + query]};
}

template <int TYPE, int WIDTH> DEVICE void back_queries(const Attention& p, ByRow<WIDTH>& keys, ByPair<WIDTH>& pairs, ByRow<WIDTH>& values) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    Owned tile_of = owned(p.queries, p.heads, 64);
    int first = tile_of.first, own = first + 16 * threadIdx.y, h = tile_of.head, b = tile_of.batch;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    u32 q[WIDTH / 16][4], gradient[WIDTH / 16][4];
    own_rows(q, p.q, head_of(p.q, b, h), own, p.queries, p.width);
    own_rows(gradient, p.gradient, head_of(p.gradient, b, h), own, p.queries, p.value_width);
    Facts of[2] = {facts(p, b, h, own + g), facts(p, b, h, own + g + 8)};
    float acc[WIDTH / 8][4] = {}, factor = p.dropout ? p.factor : 1.0f;
    int end = seen(p, first + 64);
    ONCE for (int tile = 0; tile < end; tile += 64) {
        fetch(keys, p.k, keys_of, tile, p.keys, p.width);
        fetch(pairs, p.k, keys_of, tile, p.keys, p.width);
        fetch(values, p.v, values_of, tile, p.keys, p.value_width);
        SYNC();
        // Half a tile at a time, which halves the registers.
        ONCE for (int half = 0; half < 64; half += 32) {
            int from = tile + half;
            float s[4][4] = {}, d[4][4] = {};
            dots<TYPE>(s, q, keys, half);
            dots<TYPE>(d, gradient, values, half);
            auto query = [&](int, int i) { return own + g + 8 * (i / 2); };
            auto key = [&](int j, int i) { return from + 8 * j + 2 * t + i % 2; };
            scores(p, b, h, {first, first + 64}, {from, from + 32}, query, key, s);
            u32 kept = kept_of<4>(p, b, h, query, key);
            UNROLL for (int j = 0; j < 4; j++) UNROLL for (int i = 0; i < 4; i++) {
                float log = of[i / 2].log, share = log == -INF ? 0.0f : expf(s[j][i] - log);
                s[j][i] = share * (d[j][i] * (kept >> (4 * j + i) & 1 ? factor : 0.0f) - of[i / 2].delta) * p.scale;
            }
            weigh<TYPE>(acc, s, pairs, half);
        }
        SYNC();
    }
    put<TYPE>(p.dq, head_of(p.dq, b, h), own, p.queries, p.width, acc);
}

// Gradients of a tile of keys, of values or of both, whichever is not a number; both only where their groups agree.
template <int TYPE, int WIDTH>
DEVICE void back_keys(const Attention& p, ByRow<WIDTH>& q, ByPair<WIDTH>& q_pairs, ByRow<WIDTH>& gradient, ByPair<WIDTH>& gradient_pairs, Facts* of) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4, group = p.group[p.dk.number ? 1 : 0], own_heads = p.heads / group;
    Owned tile_of = owned(p.keys, own_heads, 64);
    int first = tile_of.first, own = first + 16 * threadIdx.y, own_head = tile_of.head, b = tile_of.batch;
    u32 k[WIDTH / 16][4], v[WIDTH / 16][4];
    float keys[WIDTH / 8][4] = {}, values[WIDTH / 8][4] = {}, factor = p.dropout ? p.factor : 1.0f;
    ONCE for (int h = own_head * group; h < (own_head + 1) * group; h++) {
        own_rows(k, p.k, head_of(p.k, b, h / p.group[0]), own, p.keys, p.width);
        own_rows(v, p.v, head_of(p.v, b, h / p.group[1]), own, p.keys, p.value_width);
        i64 queries_of = head_of(p.q, b, h), gradients_of = head_of(p.gradient, b, h);
        ONCE for (int tile = p.causal ? first : 0; tile < p.queries; tile += 64) {
            fetch(q, p.q, queries_of, tile, p.queries, p.width);
            fetch(q_pairs, p.q, queries_of, tile, p.queries, p.width);
            fetch(gradient, p.gradient, gradients_of, tile, p.queries, p.value_width);
            fetch(gradient_pairs, p.gradient, gradients_of, tile, p.queries, p.value_width);
            int thread = threadIdx.y * 32 + threadIdx.x;
            if (thread < 64) of[thread] = facts(p, b, h, tile + thread);
            SYNC();
            ONCE for (int half = 0; half < 64; half += 32) {
                int from = tile + half;
                float s[4][4] = {}, d[4][4] = {};
                dots<TYPE>(s, k, q, half);
                dots<TYPE>(d, v, gradient, half);
                auto query = [&](int j, int i) { return from + 8 * j + 2 * t + i % 2; };
                auto key = [&](int, int i) { return own + g + 8 * (i / 2); };
                scores(p, b, h, {from, from + 32}, {first, first + 64}, query, key, s);
                u32 kept = kept_of<4>(p, b, h, query, key);
                UNROLL for (int j = 0; j < 4; j++) UNROLL for (int i = 0; i < 4; i++) {
                    Facts one = of[half + 8 * j + 2 * t + i % 2];
                    float share = one.log == -INF ? 0.0f : expf(s[j][i] - one.log), by = kept >> (4 * j + i) & 1 ? factor : 0.0f;
                    s[j][i] = share * (d[j][i] * by - one.delta) * p.scale;
                    d[j][i] = share * by;
                }
                weigh<TYPE>(keys, s, q_pairs, half);
                weigh<TYPE>(values, d, gradient_pairs, half);
            }
            SYNC();
        }
    }
    if (!p.dk.number) put<TYPE>(p.dk, head_of(p.dk, b, own_head), own, p.keys, p.width, keys);
    if (!p.dv.number) put<TYPE>(p.dv, head_of(p.dv, b, own_head), own, p.keys, p.value_width, values);
}

#define FORWARD(held, name, TYPE, width)                                                                                                         \
    KERNEL_HELD(held, name, Attention, 128) {                                                                                                 \
        SHARED ByRow<width> keys;                                                                                                          \
        SHARED ByPair<width> values;                                                                                                       \
        attend<TYPE, width>(p, keys, values);                                                                                              \
    }
#define BACKWARD(queries, keys, TYPE)                                                                                                      \
    KERNEL_HELD(2, queries, Attention, 128) {                                                                                              \
        SHARED ByRow<64> by_row, values;                                                                                                   \
        SHARED ByPair<64> pairs;                                                                                                           \
        back_queries<TYPE, 64>(p, by_row, pairs, values);                                                                                  \
    }                                                                                                                                      \
    KERNEL_HELD(3, keys, Attention, 128) {                                                                                                 \
        SHARED ByRow<64> q, gradient;                                                                                                      \
        SHARED ByPair<64> q_pairs, gradient_pairs;                                                                                         \
        SHARED Facts of[64];                                                                                                               \
        back_keys<TYPE, 64>(p, q, q_pairs, gradient, gradient_pairs, of);                                                                  \
    }

FORWARD(3, attention_bf16_64, BF16, 64)
FORWARD(2, attention_bf16_128, BF16, 128)
FORWARD(3, attention_f16_64, F16, 64)
FORWARD(2, attention_f16_128, F16, 128)
BACKWARD(attention_back_queries_bf16_64, attention_back_keys_bf16_64, BF16)
BACKWARD(attention_back_queries_f16_64, attention_back_keys_f16_64, F16)
