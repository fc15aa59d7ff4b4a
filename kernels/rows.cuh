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

// The largest element of a row and the sum of the exponentials of the differences from it.
DEVICE void extent_of(const Rows& p, const Operand& o, i64 row, double* slots, float& most, double& sum) {
    most = -INF;
    ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) most = larger(at(o, row, i), most);
    most = (float)block_reduce((double)most, slots, [](double a, double b) { return is_nan(a) || a > b ? a : b; });
    sum = 0.0;
    ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) sum += (double)expf(at(o, row, i) - most);
    sum = block_sum(sum, slots);
}
