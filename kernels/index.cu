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

// A block for each 16 rows of the table: it finds the places that name one of them, and adds their gradients in order.
// o: table gradient (strides: row, ..., column), gradient, indices; k: padding row, rows, the first of them in the table, table rows.
const int TABLE_ROWS = 16;
// Where more places name its rows, a block looks through all numbers again for each of them.
const u32 MOST_NAMED = 512;
KERNEL(embedding_backward, Rows, 256) {
    SHARED u8 named[256];
    SHARED u32 places[MOST_NAMED];
    SHARED u8 rows[MOST_NAMED];
    i64 base = (i64)blockIdx.x * TABLE_ROWS;
    // The same in all threads.
    u32 count = 0;
    ONCE for (i64 first = 0; first < p.rows; first += blockDim.x) {
        i64 place = first + threadIdx.x;
        int hit = 0;
        if (place < p.rows) {
            i64 number = load<i64>(p.o[2], row_place(p, p.o[2], place)), own = number - p.k[2];
            if (own >= base && own < base + TABLE_ROWS && number != p.k[0]) hit = 1 + (int)(own - base);
            if (base == 0 && (number < 0 || number >= p.k[3])) *p.status = p.item;
        }
        named[threadIdx.x] = (u8)hit;
        if (SYNC_OR(hit)) {
            ONCE for (u32 t = 0; t < blockDim.x; t++) {
                if (!named[t]) continue;
                if (count < MOST_NAMED && threadIdx.x == 0) {
                    places[count] = (u32)(first + t);
                    rows[count] = (u8)(named[t] - 1);
                }
                count++;
            }
        }
        SYNC();
    }
    ONCE for (i64 row = 0; row < TABLE_ROWS && base + row < p.k[1]; row++) {
        i64 own = base + row;
        ONCE for (i64 column = threadIdx.x; column < p.length; column += blockDim.x) {
            float sum = 0.0f;
            if (count <= MOST_NAMED) {
                ONCE for (u32 i = 0; i < count; i++)
                    if (rows[i] == row) sum += at(p.o[1], row_place(p, p.o[1], places[i]), column);
            } else if (p.k[2] + own != p.k[0]) {
                ONCE for (i64 place = 0; place < p.rows; place++)
                    if (load<i64>(p.o[2], row_place(p, p.o[2], place)) == p.k[2] + own) sum += at(p.o[1], row_place(p, p.o[1], place), column);
            }
            put(p.o[0], own * p.o[0].stride[0], column, sum);
        }
    }
}
