// Attention over heads up to 64 wide, in f32: every thread keeps 4 by 4 scores and results in registers.
//
// 16 by 16 threads do a tile of 64 by 64. Matrices lie turned in shared memory, a column of four rows in a place of 16 bytes,
// so that both factors of every product come as fours: 8 loads for 64 multiplications. The facts of a row, its largest score
// and its sum, are in the registers of the 16 threads that share the row.

// A column in each line, rows by fours. Places in a line are permuted, so that neither turning nor reading meets a bank twice.
struct alignas(16) Panel {
    Four x[64][16];
};
typedef float Block[4][4];

DEVICE const Four& four(const Panel& panel, int line, int group) { return panel.x[line][group ^ (line >> 2)]; }
DEVICE Four& four(Panel& panel, int line, int group) { return panel.x[line][group ^ (line >> 2)]; }

// Whether rows of a head are whole fours of f32.
DEVICE bool by_fours(const Operand& o, i64 head, int width) {
    return o.dtype == F32 && o.stride[3] == 1 && ((u64)o.data + 4 * head) % 16 == 0 && o.stride[2] % 4 == 0 && width % 4 == 0;
}

// 64 rows of one head from `first` on; zeros beyond its end.
DEVICE void fetch(Panel& panel, const Operand& o, i64 head, int first, int rows, int width) {
    bool whole = by_fours(o, head, width);
    UNROLL for (int step = 0; step < 4; step++) {
        int row = threadIdx.y + 16 * step, column = 4 * threadIdx.x;
        Four from = {};
        if (first + row < rows) {
            i64 at = head + (first + row) * o.stride[2];
            if (whole) {
                if (column < width) from = *(const Four*)((const float*)o.data + at + column);
            } else {
                UNROLL for (int j = 0; j < 4; j++)
                    if (column + j < width) from.x[j] = load_real(o.data, o.dtype, at + (column + j) * o.stride[3]);
            }
        }
        UNROLL for (int j = 0; j < 4; j++) four(panel, column + j, row / 4).x[row % 4] = from.x[j];
    }
}

// This thread's 4 rows and 4 columns of a tile, from acc to a head of o.
DEVICE void put(const Operand& o, i64 head, int first, int rows, int width, const Block& acc) {
    bool whole = by_fours(o, head, width);
    int column = 4 * threadIdx.x;
    UNROLL for (int r = 0; r < 4; r++) {
        int row = first + 4 * threadIdx.y + r;
        if (row >= rows) continue;
        i64 at = head + row * o.stride[2];
        if (whole) {
            if (column < width) *(Four*)((float*)o.data + at + column) = Four{acc[r][0], acc[r][1], acc[r][2], acc[r][3]};
        } else {
            UNROLL for (int j = 0; j < 4; j++)
                if (column + j < width) store_real(o.data, o.dtype, at + (column + j) * o.stride[3], acc[r][j]);
        }
    }
}

// out[r][c] += the dot product of row 4 y + r of one and row 4 x + c of the other.
DEVICE void dots(Block& out, const Panel& a, const Panel& b, int width) {
    int tx = threadIdx.x, ty = threadIdx.y;
    TWICE for (int k = 0; k < width; k++) {
        Four x = four(a, k, ty), y = four(b, k, tx);
        UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < 4; c++) out[r][c] += x.x[r] * y.x[c];
    }
}

// acc[r][c] += the sum over 64 lines k of weights (k, 4 y + r) times values (4 x + c, k).
DEVICE void weigh(Block& acc, const Panel& weights, const Panel& values) {
    int tx = threadIdx.x, ty = threadIdx.y;
    ONCE for (int k = 0; k < 64; k += 4) {
        Four y[4];
        UNROLL for (int c = 0; c < 4; c++) y[c] = four(values, 4 * tx + c, k / 4);
        UNROLL for (int j = 0; j < 4; j++) {
            Four x = four(weights, k + j, ty);
            UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < 4; c++) acc[r][c] += x.x[r] * y[c].x[j];
        }
    }
}

// Of 4 by 4 scores from (query, key) on, a bit for each that a function holds for; not unrolled, which would take registers.
template <class F> DEVICE u32 bits(F holds) {
    u32 all = 0;
    ONCE for (int at = 0; at < 16; at++) all |= (u32)holds(at / 4, at % 4) << at;
    return all;
}

// Products to scores: minus infinity where a key is not seen.
DEVICE void scores(const Attention& p, int b, int h, int query, int key, Block& s) {
    bool masked = !p.bias.number && !is_real(p.bias.dtype), added = !p.bias.number && !masked;
    i64 mask = head_of(p.bias, b, h) + query * p.bias.stride[2] + key * p.bias.stride[3];
    u32 open = 0xffff;
    if (masked || query + 4 > p.queries || key + 4 > p.keys || (p.causal && key + 3 > query))
        open = bits([&](int r, int c) {
            if (query + r >= p.queries || key + c >= p.keys || (p.causal && key + c > query + r)) return false;
            return !masked || ((const u8*)p.bias.data)[mask + r * p.bias.stride[2] + c * p.bias.stride[3]] != 0;
        });
    UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < 4; c++) {
        float x = s[r][c] * p.scale;
        bool seen = open >> (4 * r + c) & 1;
        if (added && seen) x += load_real(p.bias.data, p.bias.dtype, mask + r * p.bias.stride[2] + c * p.bias.stride[3]);
        s[r][c] = seen ? x : -INF;
    }
}

// Which weights dropout keeps.
DEVICE u32 kept_of(const Attention& p, int b, int h, int query, int key) {
    if (!p.dropout) return 0xffff;
    u64 row = ((u64)b * p.heads + h) * p.queries + query;
    return bits([&](int r, int c) { return keep(p.random, (row + r) * p.keys + key + c); });
}

KERNEL_HELD(2, attention_64, Attention, 256) {
    // Keys, and after the scores their weights.
    SHARED Panel q, keys, values;
    int tx = threadIdx.x, ty = threadIdx.y;
    Owned own = owned(p.queries, p.heads, 64);
    int first = own.first, h = own.head, b = own.batch;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    Block acc = {};
    float most[4], sum[4];
    UNROLL for (int r = 0; r < 4; r++) {
        most[r] = -INF;
        sum[r] = 0.0f;
    }
    fetch(q, p.q, head_of(p.q, b, h), first, p.queries, p.width);
    int end = seen(p, first + 64);
    ONCE for (int key = 0; key < end; key += 64) {
        fetch(keys, p.k, keys_of, key, p.keys, p.width);
        fetch(values, p.v, values_of, key, p.keys, p.value_width);
        SYNC();
        Block s = {};
        dots(s, q, keys, p.width);
        scores(p, b, h, first + 4 * ty, key + 4 * tx, s);
        u32 kept = kept_of(p, b, h, first + 4 * ty, key + 4 * tx);
        float factor = p.dropout ? p.factor : 1.0f;
        UNROLL for (int r = 0; r < 4; r++) {
            float m = most[r];
            UNROLL for (int c = 0; c < 4; c++) m = larger_of(m, s[r][c]);
            UNROLL for (int lane = 8; lane > 0; lane /= 2) m = larger_of(m, OTHER_LANE(m, lane));
            float base = m == -INF ? 0.0f : m, shrink = expf((most[r] == -INF ? base : most[r]) - base);
            most[r] = m;
            sum[r] *= shrink;
            UNROLL for (int c = 0; c < 4; c++) {
                acc[r][c] *= shrink;
                s[r][c] = expf(s[r][c] - base);
                sum[r] += s[r][c];
                s[r][c] = kept >> (4 * r + c) & 1 ? s[r][c] * factor : 0.0f;
            }
        }
        SYNC();
        UNROLL for (int c = 0; c < 4; c++) four(keys, 4 * tx + c, ty) = Four{s[0][c], s[1][c], s[2][c], s[3][c]};
        SYNC();
        weigh(acc, keys, values);
        SYNC();
    }
    UNROLL for (int r = 0; r < 4; r++) {
        UNROLL for (int lane = 8; lane > 0; lane /= 2) sum[r] += OTHER_LANE(sum[r], lane);
        float by = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
        UNROLL for (int c = 0; c < 4; c++) acc[r][c] *= by;
        int query = first + 4 * ty + r;
        if (tx == 0 && query < p.queries && !p.sums.number)
            store<float>(p.sums, head_of(p.sums, b, h) + query * p.sums.stride[2], (most[r] == -INF ? 0.0f : most[r]) + logf(sum[r]));
    }
    put(p.out, head_of(p.out, b, h), first, p.queries, p.value_width, acc);
}

// Of this thread's four queries: the logarithm of the sum, and the dot product of result and its gradient.
DEVICE void facts(const Attention& p, int b, int h, int first, float* logs, float* delta) {
    UNROLL for (int r = 0; r < 4; r++) {
        int query = first + 4 * threadIdx.y + r;
        bool inside = query < p.queries;
        logs[r] = inside ? load<float>(p.sums, head_of(p.sums, b, h) + query * p.sums.stride[2]) : -INF;
        delta[r] = inside ? p.delta[((i64)b * p.heads + h) * p.queries + query] : 0.0f;
    }
}

// Scores to the slopes of scores, and the slopes of weights to weights.
DEVICE void slopes(const Attention& p, int b, int h, int query, int key, const float* logs, const float* delta, Block& score_of, Block& slope_of) {
    scores(p, b, h, query, key, score_of);
    u32 kept = kept_of(p, b, h, query, key);
    float factor = p.dropout ? p.factor : 1.0f;
    UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < 4; c++) {
        float share = logs[r] == -INF ? 0.0f : expf(score_of[r][c] - logs[r]), by = kept >> (4 * r + c) & 1 ? factor : 0.0f;
        score_of[r][c] = share * (slope_of[r][c] * by - delta[r]) * p.scale;
        slope_of[r][c] = share * by;
    }
}

KERNEL_HELD(2, attention_back_queries_64, Attention, 256) {
    // Values, and after the scores their slopes.
    struct Panels {
        Panel q, gradient, keys, values;
    };
    static_assert(sizeof(Panels) == 64 << 10, "as in emit/attention.rs");
    DYNAMIC_SHARED(Panels, in);
    int tx = threadIdx.x, ty = threadIdx.y;
    Owned own = owned(p.queries, p.heads, 64);
    int first = own.first, h = own.head, b = own.batch;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    Block acc = {};
    float logs[4], delta[4];
    facts(p, b, h, first, logs, delta);
    fetch(in.q, p.q, head_of(p.q, b, h), first, p.queries, p.width);
    fetch(in.gradient, p.gradient, head_of(p.gradient, b, h), first, p.queries, p.value_width);
    int end = seen(p, first + 64);
    ONCE for (int key = 0; key < end; key += 64) {
        fetch(in.keys, p.k, keys_of, key, p.keys, p.width);
        fetch(in.values, p.v, values_of, key, p.keys, p.value_width);
        SYNC();
        Block s = {}, d = {};
        dots(s, in.q, in.keys, p.width);
        dots(d, in.gradient, in.values, p.value_width);
        slopes(p, b, h, first + 4 * ty, key + 4 * tx, logs, delta, s, d);
        SYNC();
        UNROLL for (int c = 0; c < 4; c++) four(in.values, 4 * tx + c, ty) = Four{s[0][c], s[1][c], s[2][c], s[3][c]};
        SYNC();
        weigh(acc, in.values, in.keys);
        SYNC();
    }
    put(p.dq, head_of(p.dq, b, h), first, p.queries, p.width, acc);
}

// Gradients of a tile of keys, of values or of both, whichever is not a number; both only where their groups agree.
KERNEL_HELD(2, attention_back_keys_64, Attention, 256) {
    struct Panels {
        Panel keys, values, q, gradient, slopes, weights;
    };
    static_assert(sizeof(Panels) == 96 << 10, "as in emit/attention.rs");
    DYNAMIC_SHARED(Panels, in);
    int tx = threadIdx.x, ty = threadIdx.y, group = p.group[p.dk.number ? 1 : 0], own_heads = p.heads / group;
    Owned of = owned(p.keys, own_heads, 64);
    int first = of.first, own = of.head, b = of.batch;
    Block keys = {}, values = {};
    ONCE for (int h = own * group; h < (own + 1) * group; h++) {
        fetch(in.keys, p.k, head_of(p.k, b, h / p.group[0]), first, p.keys, p.width);
        fetch(in.values, p.v, head_of(p.v, b, h / p.group[1]), first, p.keys, p.value_width);
        ONCE for (int query = p.causal ? first : 0; query < p.queries; query += 64) {
            fetch(in.q, p.q, head_of(p.q, b, h), query, p.queries, p.width);
            fetch(in.gradient, p.gradient, head_of(p.gradient, b, h), query, p.queries, p.value_width);
            float logs[4], delta[4];
            facts(p, b, h, query, logs, delta);
            SYNC();
            Block s = {}, d = {};
            dots(s, in.q, in.keys, p.width);
            dots(d, in.gradient, in.values, p.value_width);
            slopes(p, b, h, query + 4 * ty, first + 4 * tx, logs, delta, s, d);
            UNROLL for (int r = 0; r < 4; r++) {
                four(in.slopes, 4 * ty + r, tx) = Four{s[r][0], s[r][1], s[r][2], s[r][3]};
                four(in.weights, 4 * ty + r, tx) = Four{d[r][0], d[r][1], d[r][2], d[r][3]};
            }
            SYNC();
            weigh(keys, in.slopes, in.q);
            weigh(values, in.weights, in.gradient);
            SYNC();
        }
    }
    if (!p.dk.number) put(p.dk, head_of(p.dk, b, own), first, p.keys, p.width, keys);
    if (!p.dv.number) put(p.dv, head_of(p.dv, b, own), first, p.keys, p.value_width, values);
}
