// Rows by number, and gradients added back to them. A number out of range is reported, and counts as 0.

struct Index {
    i64 count;
    int rank;
    int indices;
    u32 shape[RANK];
    Operand out;
    Operand from;
    Operand index[4];
    i64 step[4];
    i64 extent[4];
    // Negative numbers count from the end.
    i64 wrap;
    i64* status;
    i64 item;
};

// out[i] = from[place of i + the steps of the numbers found at i].
template <class T> DEVICE void look_up(const Index& p) {
    bool small = p.count <= 0xffffffffll;
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        i64 out = 0, from = 0, rest = i;
        i64 at[4] = {0, 0, 0, 0};
        ONCE for (int d = p.rank - 1; d >= 0; d--) {
            i64 c = take(rest, p.shape[d], small);
            out += c * p.out.stride[d];
            from += c * p.from.stride[d];
            UNROLL for (int k = 0; k < 4; k++) at[k] += c * p.index[k].stride[d];
        }
        UNROLL for (int k = 0; k < 4; k++) {
            if (k < p.indices) {
                i64 number = load<i64>(p.index[k], at[k]);
                if (p.wrap && number < 0) number += p.extent[k];
                if (number < 0 || number >= p.extent[k]) {
                    *p.status = p.item;
                    number = 0;
                }
                from += number * p.step[k];
            }
        }
        store<T>(p.out, out, load<T>(p.from, from));
    }
}
KERNEL(f_look_up, Index, 256) { look_up<float>(p); }
KERNEL(i_look_up, Index, 256) { look_up<i64>(p); }

// A block for each row of the table: adds, in order, the gradients of the places that name it. o: table gradient
// (strides: row, ..., column), gradient, indices; k: padding row, table rows.
KERNEL(embedding_backward, Rows, 256) {
    SHARED u8 named[256];
    i64 own = blockIdx.x;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ONCE for (i64 first_column = 0; first_column < p.length; first_column += 4 * blockDim.x) {
        UNROLL for (int j = 0; j < 4; j++) sum[j] = 0.0f;
        ONCE for (i64 first = 0; first < p.rows; first += blockDim.x) {
            i64 place = first + threadIdx.x;
            int hit = 0;
            if (place < p.rows) {
                i64 number = load<i64>(p.o[2], row_place(p, p.o[2], place));
                hit = number == own && own != p.k[0];
                if (own == 0 && (number < 0 || number >= p.k[1])) *p.status = p.item;
            }
            named[threadIdx.x] = (u8)hit;
            if (SYNC_OR(hit)) {
                ONCE for (u32 t = 0; t < blockDim.x && first + t < p.rows; t++) {
                    if (!named[t]) continue;
                    i64 row = row_place(p, p.o[1], first + t);
                    UNROLL for (int j = 0; j < 4; j++) {
                        i64 column = first_column + j * (i64)blockDim.x + threadIdx.x;
                        if (column < p.length) sum[j] += at(p.o[1], row, column);
                    }
                }
            }
            SYNC();
        }
        UNROLL for (int j = 0; j < 4; j++) {
            i64 column = first_column + j * (i64)blockDim.x + threadIdx.x;
            if (column < p.length) put(p.o[0], own * p.o[0].stride[0], column, sum[j]);
        }
    }
}
