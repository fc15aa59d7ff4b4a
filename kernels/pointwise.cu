// Arithmetic element by element, comparisons, selection, activations and their gradients, copies and fills. The load
// that operators are measured under.
//
// `f_` kernels work in f32, `i_` kernels in whole numbers; operands are converted as they are read and written.

#define F1(name, expression)                                                                                                               \
    KERNEL(f_##name, Map, 256) {                                                                                                           \
        each<float, 1>(p, [&](const float* in, i64) -> float {                                                                             \
            float a = in[0];                                                                                                               \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define F2(name, expression)                                                                                                               \
    KERNEL(f_##name, Map, 256) {                                                                                                           \
        each<float, 2>(p, [&](const float* in, i64) -> float {                                                                             \
            float a = in[0], b = in[1];                                                                                                    \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define F3(name, expression)                                                                                                               \
    KERNEL(f_##name, Map, 256) {                                                                                                           \
        each<float, 3>(p, [&](const float* in, i64) -> float {                                                                             \
            float a = in[0], b = in[1], c = in[2];                                                                                         \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define I1(name, expression)                                                                                                               \
    KERNEL(i_##name, Map, 256) {                                                                                                           \
        each<i64, 1>(p, [&](const i64* in, i64) -> i64 {                                                                                   \
            i64 a = in[0];                                                                                                                 \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define I2(name, expression)                                                                                                               \
    KERNEL(i_##name, Map, 256) {                                                                                                           \
        each<i64, 2>(p, [&](const i64* in, i64) -> i64 {                                                                                   \
            i64 a = in[0], b = in[1];                                                                                                      \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define I3(name, expression)                                                                                                               \
    KERNEL(i_##name, Map, 256) {                                                                                                           \
        each<i64, 3>(p, [&](const i64* in, i64) -> i64 {                                                                                   \
            i64 a = in[0], b = in[1], c = in[2];                                                                                           \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define BOTH1(name, expression) F1(name, expression) I1(name, expression)
#define BOTH2(name, expression) F2(name, expression) I2(name, expression)
#define BOTH3(name, expression) F3(name, expression) I3(name, expression)

// Whole numbers wrap.
DEVICE i64 wrap_add(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE i64 wrap_mul(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
DEVICE i64 wrap_neg(i64 a) { return (i64)(0 - (u64)a); }
DEVICE i64 safe_div(i64 a, i64 b) { return b == 0 ? 0 : b == -1 ? wrap_neg(a) : a / b; }
DEVICE i64 floor_div(i64 a, i64 b) {
    if (b == 0) return 0;
    i64 q = safe_div(a, b), r = b == -1 ? 0 : a % b;
    return r != 0 && (r < 0) != (b < 0) ? q - 1 : q;
}
DEVICE i64 int_pow(i64 a, i64 b) {
    if (b < 0) return a == 1 ? 1 : a == -1 ? 1 - 2 * (b & 1) : 0;
    u64 result = 1, factor = (u64)a;
    for (u64 n = (u64)b & 0xffffffffu; n > 0; n >>= 1) {
        if (n & 1) result *= factor;
        factor *= factor;
    }
    return (i64)result;
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float clip(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

BOTH1(copy, a)
F2(add, a + b)
I2(add, wrap_add(a, b))
F2(sub, a - b)
I2(sub, wrap_add(a, wrap_neg(b)))
F2(add_scaled, a + p.s[0] * b)
I2(add_scaled, wrap_add(a, wrap_mul(p.k[0], b)))
F2(rsub, b - p.s[0] * a)
I2(rsub, wrap_add(b, wrap_neg(wrap_mul(p.k[0], a))))
F2(mul, a * b)
I2(mul, wrap_mul(a, b))
F2(div, a / b)
I2(div, safe_div(a, b))
F2(div_floor, floorf(a / b))
I2(div_floor, floor_div(a, b))
F2(div_trunc, truncf(a / b))
F2(remainder, a - b * floorf(a / b))
I2(remainder, b == 0 ? 0 : wrap_add(a, wrap_neg(wrap_mul(b, floor_div(a, b)))))
F2(maximum, is_nan(a) || a > b ? a : b)
I2(maximum, a > b ? a : b)
F2(minimum, is_nan(a) || a < b ? a : b)
I2(minimum, a < b ? a : b)
F2(pow, powf(a, b))
I2(pow, int_pow(a, b))
F1(cube, a* a* a)
F1(inverse_square, 1.0f / (a * a))
F1(neg, -a)
I1(neg, wrap_neg(a))
F1(abs, fabsf(a))
I1(abs, a < 0 ? wrap_neg(a) : a)
F1(square, a* a)
I1(square, wrap_mul(a, a))
F1(sign, a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a * 0.0f)
I1(sign, a > 0 ? 1 : a < 0 ? -1 : 0)
F1(sqrt, sqrtf(a))
F1(rsqrt, 1.0f / sqrtf(a))
F1(reciprocal, 1.0f / a)
F1(exp, expf(a))
F1(expm1, expm1f(a))
F1(log, logf(a))
F1(log1p, log1pf(a))
F1(erf, erff(a))
F1(sin, sinf(a))
F1(cos, cosf(a))
F1(tanh, tanhf(a))
F1(floor, floorf(a))
F1(ceil, ceilf(a))
F3(clamp, clip(a, b, c))
I3(clamp, (a < b ? b : a) > c ? c : (a < b ? b : a))
F2(clamp_min, a < b ? b : a)
F2(clamp_max, a > b ? b : a)
BOTH3(where, a != 0 ? b : c)
BOTH3(masked_fill, b != 0 ? c : a)
BOTH2(eq, a == b)
BOTH2(ne, a != b)
BOTH2(lt, a < b)
BOTH2(le, a <= b)
BOTH2(gt, a > b)
BOTH2(ge, a >= b)
BOTH2(logical_and, a != 0 && b != 0)
BOTH2(logical_or, a != 0 || b != 0)
BOTH2(logical_xor, (a != 0) != (b != 0))
BOTH1(logical_not, a == 0)
F1(isneginf, a == -INF)
F1(isposinf, a == INF)
F1(isinf, fabsf(a) == INF)
F1(isnan, is_nan(a))
I1(zero, a * 0)
I2(and, a & b)
I2(or, a | b)
I2(xor, a ^ b)
I1(not, ~a)
F3(addcmul, a + p.s[0] * b * c)
F3(addcdiv, a + p.s[0] * b / c)
// From the nearer end, as the framework.
DEVICE float lerp(float a, float b, float weight) { return fabsf(weight) < 0.5f ? a + weight * (b - a) : b - (b - a) * (1.0f - weight); }
F2(lerp, lerp(a, b, p.s[0]))
F3(lerp_each, lerp(a, b, c))

// Activations. Of gradients, a is the incoming one and b what was saved.
F1(relu, a < 0.0f ? 0.0f : a)
F1(clip, clip(a, p.s[0], p.s[1]))
F2(threshold_backward, b <= p.s[0] ? 0.0f : a)
F1(sigmoid, sigmoid(a))
F2(sigmoid_backward, a*(1.0f - b) * b)
F2(tanh_backward, a*(1.0f - b * b))
F1(silu, a / (1.0f + expf(-a)))
F2(silu_backward, a*(sigmoid(b) * (1.0f + b * (1.0f - sigmoid(b)))))
F1(gelu, a * 0.5f * (1.0f + erff(a * 0.70710678f)))
F1(gelu_tanh, 0.5f * a * (1.0f + tanhf(0.7978846f * (a + 0.044715f * a * a * a))))
F2(gelu_backward, a*(0.5f * (1.0f + erff(b * 0.70710678f)) + b * 0.3989423f * expf(-0.5f * b * b)))
DEVICE float gelu_tanh_slope(float x) {
    float t = tanhf(0.7978846f * (x + 0.044715f * x * x * x)), inner = 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
}
F2(gelu_tanh_backward, a* gelu_tanh_slope(b))
F1(hardsigmoid, clip(a + 3.0f, 0.0f, 6.0f) / 6.0f)
F2(hardsigmoid_backward, b > -3.0f && b < 3.0f ? a / 6.0f : 0.0f)
F1(hardswish, a* clip(a + 3.0f, 0.0f, 6.0f) / 6.0f)
F2(hardswish_backward, b <= -3.0f ? 0.0f : b < 3.0f ? a * (b / 3.0f + 0.5f) : a)
F2(hardtanh_backward, b <= p.s[0] || b >= p.s[1] ? 0.0f : a)
F1(leaky_relu, a > 0.0f ? a : a * p.s[0])
F2(leaky_relu_backward, b > 0.0f ? a : a * p.s[0])
F1(elu, a > 0.0f ? a * p.s[1] : expm1f(a * p.s[2]) * p.s[0] * p.s[1])
F1(softplus, a * p.s[0] > p.s[1] ? a : log1pf(expf(a * p.s[0])) / p.s[0])
F2(dropout_backward, a* b* p.s[0])
F2(squared_difference, (a - b) * (a - b))
F3(mse_backward, p.s[0] * (b - c) * a)

// start + element * step, rounded once.
KERNEL(f_arange, Map, 256) {
    each<float, 1>(p, [&](const float*, i64 i) -> float { return (float)(p.o[2].value + (double)i * p.o[3].value); });
}
KERNEL(i_arange, Map, 256) {
    each<i64, 1>(p, [&](const i64*, i64 i) -> i64 { return (i64)(p.o[2].value + (double)i * p.o[3].value); });
}

// Keeps the lower (k[1] is 1) or upper triangle of the last two of the dimensions, which are not joined.
template <class T> DEVICE void triangle(const Map& p) {
    i64 columns = p.shape[p.rank - 1], rows = p.shape[p.rank - 2];
    each<T, 1>(p, [&](const T* in, i64 i) -> T {
        i64 column = i % columns, edge = i / columns % rows + p.k[0];
        return (p.k[1] ? column <= edge : column >= edge) ? in[0] : (T)0;
    });
}
KERNEL(f_triangle, Map, 256) { triangle<float>(p); }
KERNEL(i_triangle, Map, 256) { triangle<i64>(p); }

// Dropout: elements are numbered row-major. The mask is the third operand, if it is not a number.
KERNEL_HELD(4, f_dropout, Map, 256) {
    if (p.dense != 0) {
        each<float, 1>(p, [&](const float* in, i64 i) -> float { return keep(p.random, (u64)i) ? in[0] * p.s[0] : 0.0f; });
        return;
    }
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        i64 at[3];
        places<3>(p, i, at);
        bool kept = keep(p.random, (u64)i);
        store<float>(p.o[0], at[0], kept ? load<float>(p.o[1], at[1]) * p.s[0] : 0.0f);
        if (!p.o[2].number) store<i64>(p.o[2], at[2], kept);
    }
}

// Takes a factor (the second input) off a gradient; the third input becomes 1 where a number is not finite. All threads that
// write it write the same.
KERNEL(f_unscale, Map, 256) {
    each<float, 1>(p, [&](const float* in, i64) -> float {
        if (!(fabsf(in[0]) < INF)) store<float>(p.o[3], 0, 1.0f);
        return in[0] * load<float>(p.o[2], 0);
    });
}
// o: 0 scale, 1 good steps since it changed, 2 whether this step was bad; s: 0 growth, 1 backoff, 2 interval.
KERNEL(update_scale, Rows, 32) {
    if (threadIdx.x != 0) return;
    float scale = load<float>(p.o[0], 0);
    i64 good = load<i64>(p.o[1], 0) + 1;
    if (load<float>(p.o[2], 0) != 0.0f) {
        scale = (float)((double)scale * p.s[1]);
        good = 0;
    } else if ((double)good == p.s[2]) {
        float grown = (float)((double)scale * p.s[0]);
        scale = fabsf(grown) < INF ? grown : scale;
        good = 0;
    }
    store<float>(p.o[0], 0, scale);
    store<i64>(p.o[1], 0, good);
}
// The other work of `neap profile --load`: multiplications and additions in registers, and a word of each thread at the end,
// so that no compiler leaves them out.
struct Busy {
    i64 rounds;
    float* out;
};
KERNEL(busy, Busy, 256) {
    float x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = (float)threadIdx.x + i;
    for (i64 round = 0; round < p.rounds; round++)
        UNROLL for (int i = 0; i < 8; i++) x[i] = x[i] * 0.999f + 0.001f;
    float sum = 0.0f;
    UNROLL for (int i = 0; i < 8; i++) sum += x[i];
    p.out[first_thread()] = sum;
}
