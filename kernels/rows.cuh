// Rows of a tensor: an index of outer dimensions, and a run of `length` elements whose step is an operand's last stride.
struct Rows {
    i64 rows;
    i64 length;
    int rank;
    int flags;
    u32 shape[RANK];
    Operand o[6];
    double s[4];
    i64 k[4];
    // Where a bad number is reported, and as what.
    i64* status;
    i64 item;
    Parts parts;
};

DEVICE i64 row_place(const Rows& p, const Operand& o, i64 row) {
    i64 offset = 0;
    ONCE for (int d = p.rank - 1; d >= 0; d--) offset += take(row, p.shape[d], p.rows <= 0xffffffffll) * o.stride[d];
    return offset;
}

DEVICE float at(const Operand& o, i64 row, i64 i) { return load<float>(o, row + i * o.stride[RANK - 1]); }
DEVICE void put(const Operand& o, i64 row, i64 i, float value) { store<float>(o, row + i * o.stride[RANK - 1], value); }

DEVICE float larger(float a, float b) { return is_nan(a) || a > b ? a : b; }

// The largest element of a row and the sum of the exponentials of the differences from it, in one pass: a sum is taken down where
// a larger element comes.
DEVICE void extent_of(const Rows& p, const Operand& o, i64 row, double* slots, float& most, double& sum) {
    float own = -INF;
    sum = 0.0;
    ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
        float x = at(o, row, i);
        if (x == -INF) continue;
        if (is_nan(x) || x > own) {
            // Not a number where x is infinite.
            sum = sum * (double)expf(own - x) + (double)expf(x - x);
            own = x;
        } else {
            sum += (double)expf(x - own);
        }
    }
    most = (float)block_reduce((double)own, slots, [](double a, double b) { return is_nan(a) || a > b ? a : b; });
    sum = block_sum(own == -INF ? 0.0 : sum * (double)expf(own - most), slots);
}
