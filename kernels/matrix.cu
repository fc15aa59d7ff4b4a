// Matrix products and convolutions for operands that the libraries do not take. Plain and slow; sums in f32, in order.

struct Matrix {
    i64 m;
    i64 n;
    i64 k;
    i64 batch;
    int rank;
    float alpha;
    float beta;
    int pad;
    // Of the batch.
    u32 shape[4];
    // Strides: row, column, then the batch's. The bias goes by column in stride 1.
    Operand a;
    Operand b;
    Operand c;
    Operand bias;
};

// c = alpha a b + beta c + bias, 16 by 16 elements a block.
KERNEL(matrix_product, Matrix, 256) {
    SHARED float left[16][17], right[16][17];
    i64 across = (p.n + 15) / 16, down = (p.m + 15) / 16;
    ONCE for (i64 tile = blockIdx.x; tile < across * down * p.batch; tile += gridDim.x) {
        i64 rest = tile / across, a = 0, b = 0, c = 0;
        i64 column = tile % across * 16 + threadIdx.x, row = rest % down * 16 + threadIdx.y;
        rest /= down;
        ONCE for (int d = p.rank - 1; d >= 0; d--) {
            i64 at = take(rest, p.shape[d], false);
            a += at * p.a.stride[2 + d];
            b += at * p.b.stride[2 + d];
            c += at * p.c.stride[2 + d];
        }
        float sum = 0.0f;
        ONCE for (i64 first = 0; first < p.k; first += 16) {
            i64 i = first + threadIdx.x, j = first + threadIdx.y;
            left[threadIdx.y][threadIdx.x] = row < p.m && i < p.k ? load<float>(p.a, a + row * p.a.stride[0] + i * p.a.stride[1]) : 0.0f;
            right[threadIdx.y][threadIdx.x] = column < p.n && j < p.k ? load<float>(p.b, b + j * p.b.stride[0] + column * p.b.stride[1]) : 0.0f;
            SYNC();
            UNROLL for (int k = 0; k < 16; k++) sum += left[threadIdx.y][k] * right[k][threadIdx.x];
            SYNC();
        }
        if (row < p.m && column < p.n) {
            i64 at = c + row * p.c.stride[0] + column * p.c.stride[1];
            float before = p.beta != 0.0f ? p.beta * load<float>(p.c, at) : 0.0f;
            store<float>(p.c, at, p.alpha * sum + before + load<float>(p.bias, column * p.bias.stride[1]));
        }
    }
}

struct Convolution {
    i64 images;
    int groups;
    // Of one group.
    int channels_in;
    int channels_out;
    int size[2];
    int out[2];
    int kernel[2];
    int stride[2];
    int padding[2];
    int dilation[2];
    int pad;
    // Strides: batch (output channel for the weights), channel, row, column.
    Operand x;
    Operand w;
    Operand y;
    Operand bias;
};

DEVICE i64 four(const Operand& o, i64 a, i64 b, i64 c, i64 d) {
    return a * o.stride[0] + b * o.stride[1] + c * o.stride[2] + d * o.stride[3];
}

// A thread for each output.
KERNEL(convolve, Convolution, 256) {
    i64 outputs = (i64)p.groups * p.channels_out;
    ONCE for (i64 i = first_thread(); i < p.images * outputs * p.out[0] * p.out[1]; i += all_threads()) {
        i64 rest = i, column = take(rest, (u32)p.out[1], false), row = take(rest, (u32)p.out[0], false);
        i64 o = take(rest, (u32)outputs, false), first = o / p.channels_out * p.channels_in;
        float sum = 0.0f;
        ONCE for (int c = 0; c < p.channels_in; c++) {
            ONCE for (int a = 0; a < p.kernel[0]; a++) {
                i64 h = row * p.stride[0] + (i64)a * p.dilation[0] - p.padding[0];
                if (h < 0 || h >= p.size[0]) continue;
                ONCE for (int b = 0; b < p.kernel[1]; b++) {
                    i64 w = column * p.stride[1] + (i64)b * p.dilation[1] - p.padding[1];
                    if (w < 0 || w >= p.size[1]) continue;
                    sum += load<float>(p.x, four(p.x, rest, first + c, h, w)) * load<float>(p.w, four(p.w, o, c, a, b));
                }
            }
        }
        store<float>(p.y, four(p.y, rest, o, row, column), sum + load<float>(p.bias, o * p.bias.stride[0]));
    }
}

// A thread for each input pixel.
KERNEL(convolve_back_input, Convolution, 256) {
    i64 inputs = (i64)p.groups * p.channels_in;
    ONCE for (i64 i = first_thread(); i < p.images * inputs * p.size[0] * p.size[1]; i += all_threads()) {
        i64 rest = i, column = take(rest, (u32)p.size[1], false), row = take(rest, (u32)p.size[0], false);
        i64 c = take(rest, (u32)inputs, false), group = c / p.channels_in;
        float sum = 0.0f;
        ONCE for (int o = 0; o < p.channels_out; o++) {
            i64 out = group * p.channels_out + o;
            ONCE for (int a = 0; a < p.kernel[0]; a++) {
                i64 h = row + p.padding[0] - (i64)a * p.dilation[0];
                if (h < 0 || h % p.stride[0] != 0 || h / p.stride[0] >= p.out[0]) continue;
                ONCE for (int b = 0; b < p.kernel[1]; b++) {
                    i64 w = column + p.padding[1] - (i64)b * p.dilation[1];
                    if (w < 0 || w % p.stride[1] != 0 || w / p.stride[1] >= p.out[1]) continue;
                    sum += load<float>(p.y, four(p.y, rest, out, h / p.stride[0], w / p.stride[1])) *
                           load<float>(p.w, four(p.w, out, c - group * p.channels_in, a, b));
                }
            }
        }
        store<float>(p.x, four(p.x, rest, c, row, column), sum);
    }
}

// A block for each weight.
KERNEL(convolve_back_weight, Convolution, 256) {
    SHARED float slots[256];
    i64 all = (i64)p.groups * p.channels_out * p.channels_in * p.kernel[0] * p.kernel[1];
    ONCE for (i64 i = blockIdx.x; i < all; i += gridDim.x) {
        i64 rest = i, b = take(rest, (u32)p.kernel[1], false), a = take(rest, (u32)p.kernel[0], false);
        i64 c = take(rest, (u32)p.channels_in, false), o = rest, first = o / p.channels_out * p.channels_in;
        float sum = 0.0f;
        ONCE for (i64 j = threadIdx.x; j < p.images * p.out[0] * p.out[1]; j += blockDim.x) {
            i64 image = j, column = take(image, (u32)p.out[1], false), row = take(image, (u32)p.out[0], false);
            i64 h = row * p.stride[0] + a * p.dilation[0] - p.padding[0], w = column * p.stride[1] + b * p.dilation[1] - p.padding[1];
            if (h < 0 || h >= p.size[0] || w < 0 || w >= p.size[1]) continue;
            sum += load<float>(p.y, four(p.y, image, o, row, column)) * load<float>(p.x, four(p.x, image, first + c, h, w));
        }
        sum = block_reduce(sum, slots, [](float x, float y) { return x + y; });
        if (threadIdx.x == 0) store<float>(p.w, four(p.w, o, c, a, b), sum);
    }
}
