// Scaled dot-product attention and its gradients on any GPU, for heads up to 128 and up to 256 wide.
//
// 16 by 16 threads; tiles of 16. Gradients of heads wider than 128 take the other side in pieces of so many columns as shared
// memory holds.

template <int TILE, int WIDTH> struct Tile {
    float x[TILE][WIDTH + 1];
};
template <int TILE> struct Square {
    float x[TILE][TILE + 1];
};

// Rows first.. and columns from.. of one head; zeros beyond its end.
template <int TILE, int WIDTH> DEVICE void fetch(Tile<TILE, WIDTH>& tile, const Operand& o, i64 head, int first, int rows, int width, int from = 0) {
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

// Adds the dot products of this thread's rows of one tile with its rows of another; the narrower tile holds the columns from..
template <int TILE, int A, int B>
DEVICE void dots(float (&out)[TILE / 16][TILE / 16], const Tile<TILE, A>& a, const Tile<TILE, B>& b, int width, int from = 0) {
    const int R = TILE / 16, PIECE = A < B ? A : B;
    int i = threadIdx.y * R, j = threadIdx.x * R, in_a = A > PIECE ? from : 0, in_b = B > PIECE ? from : 0;
    int end = A != B && width - from > PIECE ? PIECE : width - from;
    // Two at a time: more would take registers that a fourth block needs.
    TWICE for (int k = 0; k < end; k++) {
        float x[R], y[R];
        UNROLL for (int r = 0; r < R; r++) x[r] = a.x[i + r][in_a + k];
        UNROLL for (int c = 0; c < R; c++) y[c] = b.x[j + c][in_b + k];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < R; c++) out[r][c] += x[r] * y[c];
    }
}

template <int TILE, int WIDTH>
DEVICE void attend(const Attention& p, Tile<TILE, WIDTH>& q, Tile<TILE, WIDTH>& kv, Square<TILE>& s, float* part, float* most, float* sum, float* shrink) {
    const int R = TILE / 16, W = WIDTH / 16;
    int tx = threadIdx.x, ty = threadIdx.y;
    int tiles = (p.queries + TILE - 1) / TILE, first = (int)(blockIdx.x % tiles) * TILE;
    int h = (int)(blockIdx.x / tiles) % p.heads, b = (int)(blockIdx.x / tiles) / p.heads;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    float acc[R][W];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) acc[r][w] = 0.0f;
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
        float scores[R][R] = {};
        dots(scores, q, kv, p.width);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < R; c++) {
            int i = ty * R + r, j = tx * R + c;
            s.x[i][j] = score(p, b, h, first + i, key + j, scores[r][c]);
        }
        SYNC();
        // Each row has 16 threads: its largest element, then its exponentials.
        UNROLL for (int r = 0; r < R; r++) {
            float m = -INF;
            UNROLL for (int c = 0; c < R; c++) m = larger_of(m, s.x[ty * R + r][tx * R + c]);
            part[(ty * R + r) * 16 + tx] = m;
        }
        SYNC();
        if (row < TILE) {
            float m = most[row];
            for (int c = 0; c < 16; c++) m = larger_of(m, part[row * 16 + c]);
            float base = m == -INF ? 0.0f : m;
            shrink[row] = expf((most[row] == -INF ? base : most[row]) - base);
            most[row] = m;
        }
        SYNC();
        UNROLL for (int r = 0; r < R; r++) {
            int i = ty * R + r;
            float base = most[i] == -INF ? 0.0f : most[i], total = 0.0f;
            UNROLL for (int c = 0; c < R; c++) {
                int j = tx * R + c;
                float x = expf(s.x[i][j] - base);
                total += x;
                s.x[i][j] = x * kept(p, b, h, first + i, key + j);
            }
            part[i * 16 + tx] = total;
        }
        fetch(kv, p.v, values_of, key, p.keys, p.value_width);
        SYNC();
        if (row < TILE) {
            float total = 0.0f;
            for (int c = 0; c < 16; c++) total += part[row * 16 + c];
            sum[row] = sum[row] * shrink[row] + total;
        }
        UNROLL for (int r = 0; r < R; r++) {
            float by = shrink[ty * R + r];
            UNROLL for (int w = 0; w < W; w++) acc[r][w] *= by;
        }
        ONCE for (int j = 0; j < TILE; j++) {
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) acc[r][w] += s.x[ty * R + r][j] * kv.x[j][tx + 16 * w];
        }
        SYNC();
    }
    UNROLL for (int r = 0; r < R; r++) {
        int i = ty * R + r;
        if (first + i >= p.queries) continue;
        float by = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
        i64 at = head_of(p.out, b, h) + (first + i) * p.out.stride[2];
        UNROLL for (int w = 0; w < W; w++) {
            int column = tx + 16 * w;
            if (column < p.value_width) store_real(p.out.data, p.out.dtype, at + column * p.out.stride[3], acc[r][w] * by);
        }
        if (tx == 0 && !p.sums.number)
            store<float>(p.sums, head_of(p.sums, b, h) + (first + i) * p.sums.stride[2], (most[i] == -INF ? 0.0f : most[i]) + logf(sum[i]));
    }
}

// For rows of a tile of queries: the logarithm of the sum, and the dot product of result and its gradient.
template <int TILE> DEVICE void row_facts(const Attention& p, int b, int h, int first, float* logs, float* delta) {
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

template <int TILE, int WIDTH, int PIECE>
DEVICE void back_queries(const Attention& p, Tile<TILE, WIDTH>& q, Tile<TILE, WIDTH>& g, Tile<TILE, PIECE>& kv, Square<TILE>& s, float* logs, float* delta) {
    const int R = TILE / 16, W = WIDTH / 16, PIECES = WIDTH / PIECE;
    int tx = threadIdx.x, ty = threadIdx.y;
    int tiles = (p.queries + TILE - 1) / TILE, first = (int)(blockIdx.x % tiles) * TILE;
    int h = (int)(blockIdx.x / tiles) % p.heads, b = (int)(blockIdx.x / tiles) / p.heads;
    i64 keys_of = head_of(p.k, b, h / p.group[0]), values_of = head_of(p.v, b, h / p.group[1]);
    float acc[R][W];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) acc[r][w] = 0.0f;
    fetch(q, p.q, head_of(p.q, b, h), first, p.queries, p.width);
    fetch(g, p.gradient, head_of(p.gradient, b, h), first, p.queries, p.value_width);
    row_facts<TILE>(p, b, h, first, logs, delta);
    int end = seen(p, first + TILE);
    ONCE for (int key = 0; key < end; key += TILE) {
        float slope[R][R] = {};
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            fetch(kv, p.v, values_of, key, p.keys, p.value_width, piece * PIECE);
            SYNC();
            dots(slope, g, kv, p.value_width, piece * PIECE);
            SYNC();
        }
        float scores[R][R] = {};
        UNROLL for (int piece = 0; piece < PIECES; piece++) {
            if (piece > 0) SYNC();
            fetch(kv, p.k, keys_of, key, p.keys, p.width, piece * PIECE);
            SYNC();
            dots(scores, q, kv, p.width, piece * PIECE);
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < R; c++) {
            int i = ty * R + r, j = tx * R + c;
            float x = score(p, b, h, first + i, key + j, scores[r][c]);
            float share = logs[i] == -INF ? 0.0f : expf(x - logs[i]);
            s.x[i][j] = share * (slope[r][c] * kept(p, b, h, first + i, key + j) - delta[i]) * p.scale;
        }
        SYNC();
        // The last piece is still there.
        UNROLL for (int piece = PIECES - 1; piece >= 0; piece--) {
            if (piece + 1 < PIECES) {
                fetch(kv, p.k, keys_of, key, p.keys, p.width, piece * PIECE);
                SYNC();
            }
            ONCE for (int j = 0; j < TILE; j++) {
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W / PIECES; w++)
                    acc[r][piece * (W / PIECES) + w] += s.x[ty * R + r][j] * kv.x[j][tx + 16 * w];
            }
            SYNC();
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        int i = first + ty * R + r;
        if (i >= p.queries) continue;
        UNROLL for (int w = 0; w < W; w++) {
            int column = tx + 16 * w;
            if (column < p.width) store_real(p.dq.data, p.dq.dtype, head_of(p.dq, b, h) + i * p.dq.stride[2] + column * p.dq.stride[3], acc[r][w]);
        }
    }
}

// Gradients of a tile of keys, of values or of both, whichever is not a number; both only where their groups agree.
template <int TILE, int WIDTH, int PIECE>
DEVICE void back_keys(const Attention& p, Tile<TILE, WIDTH>& k, Tile<TILE, WIDTH>& v, Tile<TILE, PIECE>& q, Tile<TILE, PIECE>& g, Square<TILE>& s,
                      Square<TILE>& d, float* logs, float* delta) {
    const int R = TILE / 16, W = WIDTH / 16, PIECES = WIDTH / PIECE;
    int tx = threadIdx.x, ty = threadIdx.y, group = p.group[p.dk.number ? 1 : 0], own_heads = p.heads / group;
    int tiles = (p.keys + TILE - 1) / TILE, first = (int)(blockIdx.x % tiles) * TILE;
    int own = (int)(blockIdx.x / tiles) % own_heads, b = (int)(blockIdx.x / tiles) / own_heads;
    float keys[R][W], values[R][W];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) keys[r][w] = values[r][w] = 0.0f;
    ONCE for (int h = own * group; h < (own + 1) * group; h++) {
        SYNC();
        fetch(k, p.k, head_of(p.k, b, h / p.group[0]), first, p.keys, p.width);
        fetch(v, p.v, head_of(p.v, b, h / p.group[1]), first, p.keys, p.value_width);
        int start = p.causal ? first / TILE * TILE : 0;
        ONCE for (int query = start; query < p.queries; query += TILE) {
            row_facts<TILE>(p, b, h, query, logs, delta);
            float scores[R][R] = {}, slopes[R][R] = {};
            UNROLL for (int piece = 0; piece < PIECES; piece++) {
                if (piece > 0) SYNC();
                fetch(q, p.q, head_of(p.q, b, h), query, p.queries, p.width, piece * PIECE);
                fetch(g, p.gradient, head_of(p.gradient, b, h), query, p.queries, p.value_width, piece * PIECE);
                SYNC();
                dots(scores, q, k, p.width, piece * PIECE);
                dots(slopes, g, v, p.value_width, piece * PIECE);
            }
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < R; c++) {
                int i = ty * R + r, j = tx * R + c;
                float x = score(p, b, h, query + i, first + j, scores[r][c]);
                float share = logs[i] == -INF ? 0.0f : expf(x - logs[i]), by = kept(p, b, h, query + i, first + j);
                d.x[i][j] = share * (slopes[r][c] * by - delta[i]) * p.scale;
                s.x[i][j] = share * by;
            }
            SYNC();
            UNROLL for (int piece = PIECES - 1; piece >= 0; piece--) {
                if (piece + 1 < PIECES) {
                    fetch(q, p.q, head_of(p.q, b, h), query, p.queries, p.width, piece * PIECE);
                    fetch(g, p.gradient, head_of(p.gradient, b, h), query, p.queries, p.value_width, piece * PIECE);
                    SYNC();
                }
                ONCE for (int i = 0; i < TILE; i++) {
                    UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W / PIECES; w++) {
                        const int at = piece * (W / PIECES) + w;
                        keys[r][at] += d.x[i][ty * R + r] * q.x[i][tx + 16 * w];
                        values[r][at] += s.x[i][ty * R + r] * g.x[i][tx + 16 * w];
                    }
                }
                SYNC();
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        int i = first + ty * R + r;
        if (i >= p.keys) continue;
        UNROLL for (int w = 0; w < W; w++) {
            int column = tx + 16 * w;
            if (!p.dk.number && column < p.width)
                store_real(p.dk.data, p.dk.dtype, head_of(p.dk, b, own) + i * p.dk.stride[2] + column * p.dk.stride[3], keys[r][w]);
            if (!p.dv.number && column < p.value_width)
                store_real(p.dv.data, p.dv.dtype, head_of(p.dv, b, own) + i * p.dv.stride[2] + column * p.dv.stride[3], values[r][w]);
        }
    }
}

#define ATTENTION(tile, width, piece, held)                                                                                                \
    KERNEL_HELD(4, attention_##width, Attention, 256) {                                                                                    \
        SHARED Tile<tile, width> q, kv;                                                                                                    \
        SHARED Square<tile> s;                                                                                                             \
        SHARED float part[tile * 16], most[tile], sum[tile], shrink[tile];                                                                 \
        attend<tile, width>(p, q, kv, s, part, most, sum, shrink);                                                                         \
    }                                                                                                                                      \
    KERNEL_HELD(4, attention_back_queries_##width, Attention, 256) {                                                                       \
        SHARED Tile<tile, width> q, g;                                                                                                     \
        SHARED Tile<tile, piece> kv;                                                                                                       \
        SHARED Square<tile> s;                                                                                                             \
        SHARED float logs[tile], delta[tile];                                                                                              \
        back_queries<tile, width, piece>(p, q, g, kv, s, logs, delta);                                                                     \
    }                                                                                                                                      \
    KERNEL_HELD(held, attention_back_keys_##width, Attention, 256) {                                                                       \
        SHARED Tile<tile, width> k, v;                                                                                                     \
        SHARED Tile<tile, piece> q, g;                                                                                                     \
        SHARED Square<tile> s, d;                                                                                                          \
        SHARED float logs[tile], delta[tile];                                                                                              \
        back_keys<tile, width, piece>(p, k, v, q, g, s, d, logs, delta);                                                                   \
    }

ATTENTION(16, 128, 128, 4)
ATTENTION(16, 256, 64, 3)
