// Batch and layer normalisation, forward and backward.
//
// Sums and sums of squares are kept in double precision, where the product of two floats is exact.

// A block for each part of a channel; threads go along `inner` in x and over the other dimensions in y. Parts divide the
// inner dimension by `inner_parts`, and the others.
struct BatchNorm {
    i64 elements;
    i64 outer;
    i64 inner;
    int rank;
    int training;
    int update;
    int inner_parts;
    u32 shape[RANK];
    // Strides of the outer dimensions; the last two are those of `inner` and of channels.
    Operand x;
    Operand y;
    Operand out;
    // By channel, in stride 0; absent ones are numbers.
    Operand weight;
    Operand bias;
    Operand mean;
    Operand deviation;
    Operand first;
    Operand second;
    double momentum;
    double eps;
    Parts parts;
};

DEVICE i64 channel_of(const BatchNorm& p) { return blockIdx.x / p.parts.count; }

DEVICE i64 outer_place(const BatchNorm& p, const Operand& o, i64 row) {
    i64 offset = channel_of(p) * o.stride[RANK - 1];
    ONCE for (int d = p.rank - 1; d >= 0; d--) offset += take(row, p.shape[d], true) * o.stride[d];
    return offset;
}

template <class F> DEVICE void channel(const BatchNorm& p, F f) {
    i64 part = blockIdx.x % p.parts.count, row, rows, from, to;
    part_of(p.outer, p.parts.count / p.inner_parts, part / p.inner_parts, row, rows);
    part_of(p.inner, p.inner_parts, part % p.inner_parts, from, to);
    ONCE for (row += threadIdx.y; row < rows; row += blockDim.y) {
        i64 x = outer_place(p, p.x, row), y = outer_place(p, p.y, row), out = outer_place(p, p.out, row);
        ONCE for (i64 i = from + threadIdx.x; i < to; i += blockDim.x)
            f(x + i * p.x.stride[RANK - 2], y + i * p.y.stride[RANK - 2], out + i * p.out.stride[RANK - 2]);
    }
}

// Adds to `a` and `b` over a channel; false if a second launch will go on with the sums of parts.
template <class F> DEVICE bool totals(const BatchNorm& p, double* slots, double& a, double& b, F add) {
    double* sums = (double*)p.parts.sums;
    if (p.parts.second) {
        i64 from = channel_of(p) * p.parts.count;
        ONCE for (i64 i = threadIdx.y * blockDim.x + threadIdx.x; i < p.parts.count; i += blockDim.x * blockDim.y) {
            a += sums[2 * (from + i)];
            b += sums[2 * (from + i) + 1];
        }
    } else {
        channel(p, add);
    }
    a = block_sum(a, slots);
    b = block_sum(b, slots);
    if (!gives_parts(p.parts)) return true;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        sums[2 * (i64)blockIdx.x] = a;
        sums[2 * (i64)blockIdx.x + 1] = b;
    }
    return false;
}

// Who writes what there is once for each channel.
DEVICE bool writes_channel(const BatchNorm& p) { return threadIdx.x == 0 && threadIdx.y == 0 && blockIdx.x % p.parts.count == 0; }
DEVICE double per_channel(const Operand& o, i64 channel) { return load<double>(o, channel * o.stride[0]); }
DEVICE void set_channel(const Operand& o, i64 channel, double value) {
    if (!o.number) store<double>(o, channel * o.stride[0], value);
}

// x to out. mean, deviation: the running ones; first, second: where mean and inverse deviation are kept.
KERNEL(batch_norm, BatchNorm, 512) {
    SHARED double slots[512];
    double mean, invstd;
    const i64 c = channel_of(p);
    if (p.training) {
        double sum = 0.0, squares = 0.0;
        bool whole = totals(p, slots, sum, squares, [&](i64 x, i64, i64) {
            double v = real<float>(p.x, x);
            sum += v;
            squares += v * v;
        });
        if (!whole) return;
        mean = sum / (double)p.elements;
        squares -= sum * mean;
        squares = squares < 0.0 ? 0.0 : squares;
        invstd = 1.0 / sqrt(squares / (double)p.elements + p.eps);
        if (p.update && writes_channel(p)) {
            double kept = 1.0 - p.momentum;
            set_channel(p.mean, c, kept * per_channel(p.mean, c) + p.momentum * mean);
            set_channel(p.deviation, c, kept * per_channel(p.deviation, c) + p.momentum * squares / ((double)p.elements - 1.0));
        }
    } else {
        mean = per_channel(p.mean, c);
        invstd = 1.0 / sqrt(per_channel(p.deviation, c) + p.eps);
    }
    if (writes_channel(p)) {
        set_channel(p.first, c, mean);
        set_channel(p.second, c, invstd);
    }
    float centre = (float)mean, scale = (float)(invstd * per_channel(p.weight, c)), shift = (float)per_channel(p.bias, c);
    channel(p, [&](i64 x, i64, i64 out) { store_real(p.out.data, p.out.dtype, out, (real<float>(p.x, x) - centre) * scale + shift); });
}

// x, y: input and gradient; out: input gradient, if wanted; first, second: gradients of weight and bias.
KERNEL(batch_norm_backward, BatchNorm, 512) {
    SHARED double slots[512];
    const i64 c = channel_of(p);
    double mean = per_channel(p.mean, c), scale = per_channel(p.deviation, c);
    double invstd = p.training ? scale : 1.0 / sqrt(scale + p.eps);
    double sum = 0.0, product = 0.0;
    bool whole = totals(p, slots, sum, product, [&](i64 x, i64 y, i64) {
        double g = real<float>(p.y, y);
        sum += g;
        product += ((double)real<float>(p.x, x) - mean) * g;
    });
    if (!whole) return;
    if (writes_channel(p)) {
        set_channel(p.first, c, product * invstd);
        set_channel(p.second, c, sum);
    }
    if (p.out.number) return;
    double n = (double)p.elements;
    float slope = (float)(invstd * per_channel(p.weight, c)), centre = (float)mean;
    float level = p.training ? (float)(sum / n) : 0.0f, tilt = p.training ? (float)(product * invstd * invstd / n) : 0.0f;
    channel(p, [&](i64 x, i64 y, i64 out) {
        store_real(p.out.data, p.out.dtype, out, (real<float>(p.y, y) - level - (real<float>(p.x, x) - centre) * tilt) * slope);
    });
}

// A block for each row. o: out, x, weight, bias, mean, inverse deviation.
KERNEL(layer_norm, Rows, 512) {
    SHARED double slots[512];
    ONCE for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        i64 to = row_place(p, p.o[0], row), from = row_place(p, p.o[1], row);
        double sum = 0.0, squares = 0.0;
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
            double v = at(p.o[1], from, i);
            sum += v;
            squares += v * v;
        }
        sum = block_sum(sum, slots);
        squares = block_sum(squares, slots);
        double mean = sum / (double)p.length, variance = squares / (double)p.length - mean * mean;
        float rstd = (float)(1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + p.s[0])), centre = (float)mean;
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x)
            put(p.o[0], to, i, (at(p.o[1], from, i) - centre) * rstd * at(p.o[2], 0, i) + at(p.o[3], 0, i));
        if (threadIdx.x == 0) {
            if (!p.o[4].number) store<float>(p.o[4], row_place(p, p.o[4], row), centre);
            if (!p.o[5].number) store<float>(p.o[5], row_place(p, p.o[5], row), rstd);
        }
    }
}

// o: input gradient, gradient, x, mean, inverse deviation, weight.
KERNEL(layer_norm_backward, Rows, 512) {
    SHARED double slots[512];
    ONCE for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        i64 to = row_place(p, p.o[0], row), from = row_place(p, p.o[1], row), source = row_place(p, p.o[2], row);
        float mean = load<float>(p.o[3], row_place(p, p.o[3], row)), rstd = load<float>(p.o[4], row_place(p, p.o[4], row));
        double total = 0.0, products = 0.0;
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
            float g = at(p.o[1], from, i) * at(p.o[5], 0, i), x = (at(p.o[2], source, i) - mean) * rstd;
            total += (double)g;
            products += (double)g * (double)x;
        }
        float sum = (float)(block_sum(total, slots) / (double)p.length), product = (float)(block_sum(products, slots) / (double)p.length);
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
            float g = at(p.o[1], from, i) * at(p.o[5], 0, i), x = (at(p.o[2], source, i) - mean) * rstd;
            put(p.o[0], to, i, rstd * (g - sum - x * product));
        }
    }
}

// 32 columns a block, rows in y. o: weight gradient, gradient, x, mean, inverse deviation, bias gradient.
KERNEL(layer_norm_weights, Rows, 512) {
    SHARED double slots[2][16][32];
    const i64 cuts = gives_parts(p.parts) ? p.parts.count : 1;
    i64 column = blockIdx.x / cuts * 32 + threadIdx.x, part = blockIdx.x % cuts, begin, end;
    part_of(p.parts.second ? p.parts.count : p.rows, cuts, part, begin, end);
    double* sums = (double*)p.parts.sums;
    double weight = 0.0, bias = 0.0;
    if (column < p.length) {
        ONCE for (i64 row = begin + threadIdx.y; row < end; row += blockDim.y) {
            if (p.parts.second) {
                weight += sums[2 * row * p.length + column];
                bias += sums[(2 * row + 1) * p.length + column];
                continue;
            }
            float mean = load<float>(p.o[3], row_place(p, p.o[3], row)), rstd = load<float>(p.o[4], row_place(p, p.o[4], row));
            float g = at(p.o[1], row_place(p, p.o[1], row), column), x = at(p.o[2], row_place(p, p.o[2], row), column);
            weight += (double)g * (double)((x - mean) * rstd);
            bias += (double)g;
        }
    }
    slots[0][threadIdx.y][threadIdx.x] = weight;
    slots[1][threadIdx.y][threadIdx.x] = bias;
    SYNC();
    for (u32 half = 8; half > 0; half /= 2) {
        if (threadIdx.y < half) {
            slots[0][threadIdx.y][threadIdx.x] += slots[0][threadIdx.y + half][threadIdx.x];
            slots[1][threadIdx.y][threadIdx.x] += slots[1][threadIdx.y + half][threadIdx.x];
        }
        SYNC();
    }
    if (threadIdx.y == 0 && column < p.length && gives_parts(p.parts)) {
        sums[2 * part * p.length + column] = slots[0][0][threadIdx.x];
        sums[(2 * part + 1) * p.length + column] = slots[1][0][threadIdx.x];
    } else if (threadIdx.y == 0 && column < p.length) {
        if (!p.o[0].number) put(p.o[0], 0, column, (float)slots[0][0][threadIdx.x]);
        if (!p.o[5].number) put(p.o[5], 0, column, (float)slots[1][0][threadIdx.x]);
    }
}
