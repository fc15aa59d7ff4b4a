// Scaled dot-product attention and its gradients on any GPU, for heads up to 128 and up to 256 wide.
//
// 16 by 16 threads; tiles of 16. Gradients of heads wider than 128 take the other side in pieces of so many columns as shared
// memory holds.

const int TILE = 16;

template <int WIDTH> struct Tile {
    float x[TILE][WIDTH + 1];
};
struct Square {
    float x[TILE][TILE + 1];
};

// Rows first.. and columns from.. of one head; zeros beyond its end.
template <int WIDTH> DEVICE void fetch(Tile<WIDTH>& tile, const Operand& o, i64 head, int first, int rows, int width, int from = 0) {
    ONCE for (int i = threadIdx.y * 16 + threadIdx.x; i < TILE * WIDTH; i += 256) {
        int row = i / WIDTH, column = i % WIDTH, at = from + column;
        bool inside = first + row < rows && at < width;
        tile.x[row][column] = inside ? load_real(o.data, o.dtype, head + (first + row) * o.stride[2] + at * o.stride[3]) : 0.0f;
    }
}

// The score of a query and a key, or minus infinity where it is not seen.
DEVICE float score(const Attention& p, int b, int h, int query, int key, float product) {
    if (query >= p.queries || key >= p.keys || (p.causal && key > query)) return -INF;
    float x = product * p.scale;
    if (p.bias.number) return x;
    i64 at = head_of(p.bias, b, h) + query * p.bias.stride[2] + key * p.bias.stride[3];
    if (is_real(p.bias.dtype)) return x + load_real(p.bias.data, p.bias.dtype, at);
    return ((const u8*)p.bias.data)[at] == 0 ? -INF : x;
}

DEVICE float kept(const Attention& p, int b, int h, int query, int key) {
    if (!p.dropout) return 1.0f;
    u64 row = ((u64)b * p.heads + h) * p.queries + query;
    return keep(p.random, row * p.keys + key) ? p.factor : 0.0f;
}

// Adds the dot product of this thread's row of one tile with its row of another; the narrower tile holds the columns from..
template <int A, int B>
DEVICE void dots(float& out, const Tile<A>& a, const Tile<B>& b, int width, int from = 0) {
    const int PIECE = A < B ? A : B;
    int in_a = A > PIECE ? from : 0, in_b = B > PIECE ? from : 0;
    int end = A != B && width - from > PIECE ? PIECE : width - from;
    // Two at a time: more would take registers that a fourth block needs.
    TWICE for (int k = 0; k < end; k++) out += a.x[threadIdx.y][in_a + k] * b.x[threadIdx.x][in_b + k];
}

template <int WIDTH>
DEVICE void attend(const Attention& p, Tile<WIDTH>& q, Tile<WIDTH>& kv, Square& s, float* part, float* most, float* sum, float* shrink) {
    const int W = WIDTH / 16;
    int tx = threadIdx.x, ty = threadIdx.y;
    Owned own = owned(p.queries, p.heads, TILE);
    int first = own.first, h = own.head, b = own.batch;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    float acc[W];
    UNROLL for (int w = 0; w < W; w++) acc[w] = 0.0f;
    fetch(q, p.q, head_of(p.q, b, h), first, p.queries, p.width);
    int row = ty * 16 + tx;
    if (row < TILE) {
        most[row] = -INF;
        sum[row] = 0.0f;
    }
    int end = seen(p, first + TILE);
    ONCE for (int key = 0; key < end; key += TILE) {
        fetch(kv, p.k, keys_of, key, p.keys, p.width);
        SYNC();
        float product = 0.0f;
        dots(product, q, kv, p.width);
        s.x[ty][tx] = score(p, b, h, first + ty, key + tx, product);
        SYNC();
        // Each row has 16 threads: its largest element, then its exponentials.
        part[row] = larger_of(-INF, s.x[ty][tx]);
        SYNC();
        if (row < TILE) {
            float m = most[row];
            for (int c = 0; c < 16; c++) m = larger_of(m, part[row * 16 + c]);
            float base = m == -INF ? 0.0f : m;
            shrink[row] = expf((most[row] == -INF ? base : most[row]) - base);
            most[row] = m;
        }
        SYNC();
        float weight = expf(s.x[ty][tx] - (most[ty] == -INF ? 0.0f : most[ty]));
        part[row] = weight;
        s.x[ty][tx] = weight * kept(p, b, h, first + ty, key + tx);
        fetch(kv, p.v, values_of, key, p.keys, p.value_width);
        SYNC();
        if (row < TILE) {
            float total = 0.0f;
            for (int c = 0; c < 16; c++) total += part[row * 16 + c];
            sum[row] = sum[row] * shrink[row] + total;
        }
        UNROLL for (int w = 0; w < W; w++) acc[w] *= shrink[ty];
        ONCE for (int j = 0; j < TILE; j++) {
            UNROLL for (int w = 0; w < W; w++) acc[w] += s.x[ty][j] * kv.x[j][tx + 16 * w];
        }
        SYNC();
    }
    if (first + ty >= p.queries) return;
    float by = sum[ty] == 0.0f ? 0.0f : 1.0f / sum[ty];
    i64 at = head_of(p.out, b, h) + (first + ty) * p.out.stride[2];
    UNROLL for (int w = 0; w < W; w++) {
        int column = tx + 16 * w;
        if (column < p.value_width) store_real(p.out.data, p.out.dtype, at + column * p.out.stride[3], acc[w] * by);
    }
    if (tx == 0 && !p.sums.number)
        store<float>(p.sums, head_of(p.sums, b, h) + (first + ty) * p.sums.stride[2], (most[ty] == -INF ? 0.0f : most[ty]) + logf(sum[ty]));
}

// For rows of a tile of queries: the logarithm of the sum, and the dot product of result and its gradient.
DEVICE void row_facts(const Attention& p, int b, int h, int first, float* logs, float* delta) {
    int row = threadIdx.y * 16 + threadIdx.x;
    if (row >= TILE) return;
    logs[row] = -INF;
    delta[row] = 0.0f;
    if (first + row >= p.queries) return;
    logs[row] = load<float>(p.sums, head_of(p.sums, b, h) + (first + row) * p.sums.stride[2]);
    delta[row] = p.delta[((i64)b * p.heads + h) * p.queries + first + row];
}

// Eight queries a block, each by 32 threads.
KERNEL(attention_deltas, Attention, 256) {
    SHARED double slots[8][32];
    i64 row = (i64)blockIdx.x * 8 + threadIdx.y;
    bool inside = row < (i64)p.batch * p.heads * p.queries;
    double sum = 0.0;
    if (inside) {
        int query = (int)(row % p.queries), h = (int)(row / p.queries % p.heads), b = (int)(row / p.queries / p.heads);
        i64 g = head_of(p.gradient, b, h) + query * p.gradient.stride[2], o = head_of(p.out, b, h) + query * p.out.stride[2];
        ONCE for (int j = threadIdx.x; j < p.value_width; j += 32)
            sum += (double)real<float>(p.gradient, g + j * p.gradient.stride[3]) * (double)real<float>(p.out, o + j * p.out.stride[3]);
    }
    slots[threadIdx.y][threadIdx.x] = sum;
    SYNC();
    for (u32 half = 16; half > 0; half /= 2) {
        if (threadIdx.x < half) slots[threadIdx.y][threadIdx.x] += slots[threadIdx.y][threadIdx.x + half];
        SYNC();
    }
    if (inside && threadIdx.x == 0) p.delta[row] = (float)slots[threadIdx.y][0];
}

template <int WIDTH, int PIECE>
DEVICE void back_queries(const Attention& p, Tile<WIDTH>& q, Tile<WIDTH>& g, Tile<PIECE>& kv, Square& s, float* logs, float* delta) {
    const int W = WIDTH / 16, PIECES = WIDTH / PIECE;
    int tx = threadIdx.x, ty = threadIdx.y;
    Owned own = owned(p.queries, p.heads, TILE);
    int first = own.first, h = own.head, b = own.batch;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    float acc[W];
    UNROLL for (int w = 0; w < W; w++) acc[w] = 0.0f;
    fetch(q, p.q, head_of(p.q, b, h), first, p.queries, p.width);
    fetch(g, p.gradient, head_of(p.gradient, b, h), first, p.queries, p.value_width);
    row_facts(p, b, h, first, logs, delta);
    int end = seen(p, first + TILE);
    ONCE for (int key = 0; key < end; key += TILE) {
        float slope = 0.0f;
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            fetch(kv, p.v, values_of, key, p.keys, p.value_width, piece * PIECE);
            SYNC();
            dots(slope, g, kv, p.value_width, piece * PIECE);
            SYNC();
        }
        float product = 0.0f;
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            if (piece > 0) SYNC();
            fetch(kv, p.k, keys_of, key, p.keys, p.width, piece * PIECE);
            SYNC();
            dots(product, q, kv, p.width, piece * PIECE);
        }
        float x = score(p, b, h, first + ty, key + tx, product);
        float share = logs[ty] == -INF ? 0.0f : expf(x - logs[ty]);
        s.x[ty][tx] = share * (slope * kept(p, b, h, first + ty, key + tx) - delta[ty]) * p.scale;
        SYNC();
        // The last piece is still there.
        UNROLL for (int piece = PIECES - 1; piece >= 0; piece--) {
            if (piece + 1 < PIECES) {
                fetch(kv, p.k, keys_of, key, p.keys, p.width, piece * PIECE);
                SYNC();
            }
            ONCE for (int j = 0; j < TILE; j++) {
                UNROLL for (int w = 0; w < W / PIECES; w++) acc[piece * (W / PIECES) + w] += s.x[ty][j] * kv.x[j][tx + 16 * w];
            }
            SYNC();
        }
    }
    if (first + ty >= p.queries) return;
    i64 at = head_of(p.dq, b, h) + (first + ty) * p.dq.stride[2];
    UNROLL for (int w = 0; w < W; w++) {
        int column = tx + 16 * w;
        if (column < p.width) store_real(p.dq.data, p.dq.dtype, at + column * p.dq.stride[3], acc[w]);
    }
}

// Gradients of a tile of keys, of values or of both, whichever is not a number; both only where their groups agree.
template <int WIDTH, int PIECE>
DEVICE void back_keys(const Attention& p, Tile<WIDTH>& k, Tile<WIDTH>& v, Tile<PIECE>& q, Tile<PIECE>& g, Square& s,
                      Square& d, float* logs, float* delta) {
    const int W = WIDTH / 16, PIECES = WIDTH / PIECE;
    int tx = threadIdx.x, ty = threadIdx.y, group = p.group[p.dk.number ? 1 : 0], own_heads = p.heads / group;
    Owned of = owned(p.keys, own_heads, TILE);
    int first = of.first, own = of.head, b = of.batch;
    float keys[W], values[W];
    UNROLL for (int w = 0; w < W; w++) keys[w] = values[w] = 0.0f;
    ONCE for (int h = own * group; h < (own + 1) * group; h++) {
        SYNC();
        fetch(k, p.k, head_of(p.k, b, h / p.group[0]), first, p.keys, p.width);
        fetch(v, p.v, head_of(p.v, b, h / p.group[1]), first, p.keys, p.value_width);
        int start = p.causal ? first / TILE * TILE : 0;
        ONCE for (int query = start; query < p.queries; query += TILE) {
            row_facts(p, b, h, query, logs, delta);
            float product = 0.0f, slope = 0.0f;
            UNROLL for (int piece = 0; piece < PIECES; piece++) {
                if (piece > 0) SYNC();
                fetch(q, p.q, head_of(p.q, b, h), query, p.queries, p.width, piece * PIECE);
                fetch(g, p.gradient, head_of(p.gradient, b, h), query, p.queries, p.value_width, piece * PIECE);
                SYNC();
                dots(product, q, k, p.width, piece * PIECE);
                dots(slope, g, v, p.value_width, piece * PIECE);
            }
            float x = score(p, b, h, query + ty, first + tx, product);
            float share = logs[ty] == -INF ? 0.0f : expf(x - logs[ty]), by = kept(p, b, h, query + ty, first + tx);
            d.x[ty][tx] = share * (slope * by - delta[ty]) * p.scale;
            s.x[ty][tx] = share * by;
            SYNC();
            UNROLL for (int piece = PIECES - 1; piece >= 0; piece--) {
                if (piece + 1 < PIECES) {
                    fetch(q, p.q, head_of(p.q, b, h), query, p.queries, p.width, piece * PIECE);
                    fetch(g, p.gradient, head_of(p.gradient, b, h), query, p.queries, p.value_width, piece * PIECE);
                    SYNC();
                }
                ONCE for (int i = 0; i < TILE; i++) {
                    UNROLL for (int w = 0; w < W / PIECES; w++) {
                        const int at = piece * (W / PIECES) + w;
                        keys[at] += d.x[i][ty] * q.x[i][tx + 16 * w];
                        values[at] += s.x[i][ty] * g.x[i][tx + 16 * w];
                    }
                }
                SYNC();
            }
        }
    }
    int i = first + ty;
    if (i >= p.keys) return;
    UNROLL for (int w = 0; w < W; w++) {
        int column = tx + 16 * w;
        if (!p.dk.number && column < p.width)
            store_real(p.dk.data, p.dk.dtype, head_of(p.dk, b, own) + i * p.dk.stride[2] + column * p.dk.stride[3], keys[w]);
        if (!p.dv.number && column < p.value_width)
            store_real(p.dv.data, p.dv.dtype, head_of(p.dv, b, own) + i * p.dv.stride[2] + column * p.dv.stride[3], values[w]);
    }
}

#define ATTENTION(width, piece, held)                                                                                                      \
    KERNEL_HELD(4, attention_##width, Attention, 256) {                                                                                    \
        SHARED Tile<width> q, kv;                                                                                                          \
        SHARED Square s;                                                                                                                   \
        SHARED float part[TILE * 16], most[TILE], sum[TILE], shrink[TILE];                                                                 \
        attend<width>(p, q, kv, s, part, most, sum, shrink);                                                                               \
    }                                                                                                                                      \
    KERNEL_HELD(4, attention_back_queries_##width, Attention, 256) {                                                                       \
        SHARED Tile<width> q, g;                                                                                                           \
        SHARED Tile<piece> kv;                                                                                                             \
        SHARED Square s;                                                                                                                   \
        SHARED float logs[TILE], delta[TILE];                                                                                              \
        back_queries<width, piece>(p, q, g, kv, s, logs, delta);                                                                           \
    }                                                                                                                                      \
    KERNEL_HELD(held, attention_back_keys_##width, Attention, 256) {                                                                       \
        SHARED Tile<width> k, v;                                                                                                           \
        SHARED Tile<piece> q, g;                                                                                                           \
        SHARED Square s, d;                                                                                                                \
        SHARED float logs[TILE], delta[TILE];                                                                                              \
        back_keys<width, piece>(p, k, v, q, g, s, d, logs, delta);                                                                         \
    }

ATTENTION(128, 128, 4)
ATTENTION(256, 64, 3)
