// Reductions over dimensions, extremes with their places, running sums.
//
// Floating sums are kept in double precision. `rows`: a block for each result, whose neighbours are reduced. `columns`:
// 32 results a block, neighbours of which are kept. Where that leaves few blocks, each result is cut in parts.

struct Reduce {
    i64 kept;
    i64 reduced;
    int kept_rank;
    int reduced_rank;
    u32 kept_shape[RANK];
    u32 reduced_shape[RANK];
    // By kept dimensions.
    Operand out;
    Operand from;
    Operand index;
    // By reduced dimensions.
    i64 step[RANK];
    i64 out_step;
    double divisor;
    int columns;
    int most;
    Parts parts;
};

DEVICE i64 reduced_place(const Reduce& p, i64 at) {
    i64 offset = 0;
    bool small = p.reduced <= 0xffffffffll;
    ONCE for (int d = p.reduced_rank - 1; d > 0; d--) offset += take(at, p.reduced_shape[d], small) * p.step[d];
    return offset + at * p.step[0];
}

DEVICE void kept_place(const Reduce& p, i64 at, i64& from, i64& out, i64& index) {
    from = out = index = 0;
    ONCE for (int d = p.kept_rank - 1; d >= 0; d--) {
        i64 c = take(at, p.kept_shape[d], p.kept <= 0xffffffffll);
        from += c * p.from.stride[d];
        out += c * p.out.stride[d];
        index += c * p.index.stride[d];
    }
}

template <class T, class W, class E, class J, class F> DEVICE void reduce(const Reduce& p, W* slots, W start, E term, J join, F finish) {
    const bool first = gives_parts(p.parts), second = p.parts.second;
    const i64 cuts = first ? p.parts.count : 1, among = second ? p.parts.count : p.reduced, width = p.columns ? 32 : 1;
    const i64 blocks = (p.kept + width - 1) / width * cuts;
    W* sums = (W*)p.parts.sums;
    ONCE for (i64 b = blockIdx.x; b < blocks; b += gridDim.x) {
        i64 k = b / cuts * width + (p.columns ? threadIdx.x : 0), from = 0, out = 0, index, begin, end;
        part_of(among, cuts, b % cuts, begin, end);
        W total = start;
        if (k < p.kept) {
            kept_place(p, k, from, out, index);
            i64 step = p.columns ? blockDim.y : blockDim.x;
            ONCE for (i64 r = begin + (p.columns ? threadIdx.y : threadIdx.x); r < end; r += step)
                total = join(total, second ? sums[r * p.kept + k] : term((W)load<T>(p.from, from + reduced_place(p, r))));
        }
        if (p.columns) {
            slots[threadIdx.y * 32 + threadIdx.x] = total;
            SYNC();
            for (u32 half = blockDim.y / 2; half > 0; half /= 2) {
                if (threadIdx.y < half) {
                    W* slot = slots + threadIdx.y * 32 + threadIdx.x;
                    *slot = join(*slot, slot[half * 32]);
                }
                SYNC();
            }
            total = slots[threadIdx.x];
            SYNC();
        } else {
            total = block_reduce(total, slots, join);
        }
        if ((p.columns ? threadIdx.y : threadIdx.x) == 0 && k < p.kept) {
            if (first) sums[b % cuts * p.kept + k] = total;
            else store<T>(p.out, out, finish(total));
        }
    }
}

#define REDUCE_TERMS(name, T, W, start, term, expression, finish)                                                                          \
    KERNEL(name, Reduce, 512) {                                                                                                            \
        SHARED W slots[512];                                                                                                               \
        reduce<T, W>(                                                                                                                      \
            p, slots, start, [](W x) -> W { return term; }, [](W a, W b) -> W { return expression; },                                      \
            [&](W total) -> T { return (T)(finish); });                                                                                    \
    }
#define REDUCE(name, T, W, start, expression, finish) REDUCE_TERMS(name, T, W, start, x, expression, finish)

REDUCE(reduce_f_sum, float, double, 0.0, a + b, total / p.divisor)
REDUCE(reduce_i_sum, i64, i64, 0, (i64)((u64)a + (u64)b), total)
REDUCE_TERMS(reduce_f_norm, float, double, 0.0, x* x, a + b, sqrt(total))
REDUCE_TERMS(reduce_f_norm_one, float, double, 0.0, fabs(x), a + b, total)
REDUCE_TERMS(reduce_f_norm_most, float, double, 0.0, fabs(x), is_nan(a) || a > b ? a : b, total)
REDUCE(reduce_f_prod, float, double, 1.0, a* b, total)
REDUCE(reduce_i_prod, i64, i64, 1, (i64)((u64)a * (u64)b), total)
REDUCE(reduce_f_max, float, double, -INF, is_nan(a) || a > b ? a : b, total)
REDUCE(reduce_f_min, float, double, INF, is_nan(a) || a < b ? a : b, total)
REDUCE(reduce_i_max, i64, i64, (i64)(1ull << 63), a > b ? a : b, total)
REDUCE(reduce_i_min, i64, i64, (i64)(~0ull >> 1), a < b ? a : b, total)
REDUCE(reduce_f_all, float, double, 1.0, a != 0 && b != 0, total)
REDUCE(reduce_i_all, i64, i64, 1, a != 0 && b != 0, total)
REDUCE(reduce_f_any, float, double, 0.0, a != 0 || b != 0, total)
REDUCE(reduce_i_any, i64, i64, 0, a != 0 || b != 0, total)

struct Best {
    double value;
    i64 place;
};

// The extreme of each row and where it first stands; NaN is the most extreme.
KERNEL(reduce_place, Reduce, 256) {
    SHARED Best slots[256];
    const int most = p.most;
    ONCE for (i64 k = blockIdx.x; k < p.kept; k += gridDim.x) {
        i64 from, out, index;
        kept_place(p, k, from, out, index);
        Best best = {0.0, -1};
        auto join = [most](Best a, Best b) -> Best {
            if (a.place < 0 || b.place < 0) return a.place < 0 ? b : a;
            if (is_nan(a.value) != is_nan(b.value)) return is_nan(a.value) ? a : b;
            if (!is_nan(a.value) && a.value != b.value) return (a.value > b.value) == (most != 0) ? a : b;
            return a.place < b.place ? a : b;
        };
        ONCE for (i64 r = threadIdx.x; r < p.reduced; r += blockDim.x) {
            Best one = {load<double>(p.from, from + reduced_place(p, r)), r};
            best = join(best, one);
        }
        best = block_reduce(best, slots, join);
        if (threadIdx.x == 0) {
            if (!p.out.number) store<double>(p.out, out, best.value);
            if (!p.index.number) store<i64>(p.index, index, best.place);
        }
    }
}

// A thread for each line.
template <class T, class W> DEVICE void running(const Reduce& p) {
    ONCE for (i64 k = first_thread(); k < p.kept; k += all_threads()) {
        i64 from, out, index;
        kept_place(p, k, from, out, index);
        W total = 0;
        ONCE for (i64 i = 0; i < p.reduced; i++) {
            total = (W)(total + (W)load<T>(p.from, from + i * p.step[0]));
            store<T>(p.out, out + i * p.out_step, (T)total);
        }
    }
}
KERNEL(running_f_sum, Reduce, 256) { running<float, double>(p); }
KERNEL(running_i_sum, Reduce, 256) { running<i64, u64>(p); }
