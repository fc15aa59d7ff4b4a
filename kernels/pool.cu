// Pooling in two dimensions: maximum with indices, averages of fixed and adaptive windows, and their backwards.
//
// Backward gathers: each pixel adds the windows that it is in, in their order, so no two threads write one place.

struct Pool {
    i64 count;
    i64 channels;
    int size[2];
    int out[2];
    int kernel[2];
    int stride[2];
    int padding[2];
    int dilation[2];
    int adaptive;
    int count_padding;
    double divisor;
    // Strides: batch, channel, row, column. Pooled values, pixels, indices.
    Operand pooled;
    Operand pixels;
    Operand index;
};

struct Place {
    i64 n;
    i64 c;
    int row;
    int column;
};

DEVICE Place place_of(const Pool& p, i64 at, const int* size) {
    bool small = p.count <= 0xffffffffll;
    Place place;
    place.column = (int)take(at, (u32)size[1], small);
    place.row = (int)take(at, (u32)size[0], small);
    place.c = take(at, (u32)p.channels, small);
    place.n = at;
    return place;
}

DEVICE i64 address(const Operand& o, const Place& at, int row, int column) {
    return at.n * o.stride[0] + at.c * o.stride[1] + row * o.stride[2] + column * o.stride[3];
}

// The pixels under window `o` in dimension `i`: first, end.
DEVICE void span(const Pool& p, int i, int o, int& first, int& end) {
    if (p.adaptive) {
        first = (int)((i64)o * p.size[i] / p.out[i]);
        end = (int)(((i64)(o + 1) * p.size[i] + p.out[i] - 1) / p.out[i]);
        return;
    }
    int start = o * p.stride[i], step = p.dilation[i], last = start + (p.kernel[i] - 1) * step + 1 - p.padding[i];
    end = last < 0 ? 0 : last < p.size[i] ? last : p.size[i];
    first = start >= p.padding[i] ? start - p.padding[i] : (step - (p.padding[i] - start) % step) % step;
}

// The windows that may hold pixel `at` in dimension `i`.
DEVICE void windows(const Pool& p, int i, int at, int& first, int& last) {
    if (p.adaptive) {
        first = (int)((i64)at * p.out[i] / p.size[i]);
        last = (int)(((i64)(at + 1) * p.out[i] - 1) / p.size[i]);
        first = first > 0 ? first - 1 : 0;
        last = last + 1 < p.out[i] ? last + 1 : p.out[i] - 1;
        return;
    }
    int reach = (p.kernel[i] - 1) * p.dilation[i], place = at + p.padding[i];
    first = place > reach ? (place - reach + p.stride[i] - 1) / p.stride[i] : 0;
    last = place / p.stride[i];
    last = last < p.out[i] ? last : p.out[i] - 1;
}

KERNEL(max_pool, Pool, 256) {
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        Place at = place_of(p, i, p.out);
        int top, bottom, left, right;
        span(p, 0, at.row, top, bottom);
        span(p, 1, at.column, left, right);
        float best = -INF;
        i64 where = (i64)top * p.size[1] + left;
        ONCE for (int row = top; row < bottom; row += p.dilation[0]) {
            ONCE for (int column = left; column < right; column += p.dilation[1]) {
                float value = load<float>(p.pixels, address(p.pixels, at, row, column));
                if (value > best || is_nan(value)) {
                    best = value;
                    where = (i64)row * p.size[1] + column;
                }
            }
        }
        store<float>(p.pooled, address(p.pooled, at, at.row, at.column), best);
        if (!p.index.number) store<i64>(p.index, address(p.index, at, at.row, at.column), where);
    }
}

KERNEL(max_pool_backward, Pool, 256) {
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        Place at = place_of(p, i, p.size);
        int top, bottom, left, right;
        windows(p, 0, at.row, top, bottom);
        windows(p, 1, at.column, left, right);
        i64 own = (i64)at.row * p.size[1] + at.column;
        float sum = 0.0f;
        ONCE for (int row = top; row <= bottom; row++) {
            ONCE for (int column = left; column <= right; column++) {
                if (load<i64>(p.index, address(p.index, at, row, column)) == own)
                    sum += load<float>(p.pooled, address(p.pooled, at, row, column));
            }
        }
        store<float>(p.pixels, address(p.pixels, at, at.row, at.column), sum);
    }
}

DEVICE double divisor_of(const Pool& p, int row, int column, int top, int bottom, int left, int right) {
    if (p.divisor != 0.0) return p.divisor;
    if (!p.count_padding) return (double)(bottom > top ? bottom - top : 0) * (double)(right > left ? right - left : 0);
    double count = 1.0;
    UNROLL for (int i = 0; i < 2; i++) {
        int start = (i ? column : row) * p.stride[i], end = p.size[i] + 2 * p.padding[i];
        count *= (double)((start + p.kernel[i] < end ? start + p.kernel[i] : end) - start);
    }
    return count;
}

KERNEL(average_pool, Pool, 256) {
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        Place at = place_of(p, i, p.out);
        int top, bottom, left, right;
        span(p, 0, at.row, top, bottom);
        span(p, 1, at.column, left, right);
        double sum = 0.0;
        ONCE for (int row = top; row < bottom; row++) {
            ONCE for (int column = left; column < right; column++) sum += load<float>(p.pixels, address(p.pixels, at, row, column));
        }
        double divisor = divisor_of(p, at.row, at.column, top, bottom, left, right);
        store<float>(p.pooled, address(p.pooled, at, at.row, at.column), (float)(sum / divisor));
    }
}

KERNEL(average_pool_backward, Pool, 256) {
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        Place at = place_of(p, i, p.size);
        int first_row, last_row, first_column, last_column;
        windows(p, 0, at.row, first_row, last_row);
        windows(p, 1, at.column, first_column, last_column);
        float sum = 0.0f;
        ONCE for (int row = first_row; row <= last_row; row++) {
            int top, bottom;
            span(p, 0, row, top, bottom);
            if (at.row < top || at.row >= bottom) continue;
            ONCE for (int column = first_column; column <= last_column; column++) {
                int left, right;
                span(p, 1, column, left, right);
                if (at.column < left || at.column >= right) continue;
                double g = load<float>(p.pooled, address(p.pooled, at, row, column));
                sum += (float)(g / divisor_of(p, row, column, top, bottom, left, right));
            }
        }
        store<float>(p.pixels, address(p.pixels, at, at.row, at.column), sum);
    }
}
