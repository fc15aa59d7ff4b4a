// One optimizer step of many parameters in one launch. Parameters, gradients and states may each be f32, bf16 or f16; all are
// computed in f32.
//
// Scalars are worked out in double precision by the caller, and rounded to f32 where they meet a tensor; the order of
// f32 operations is that of PyTorch's multi-tensor steps.

#define TENSORS 48
#define CHUNK 4096

struct One {
    // The block that its first chunk falls to.
    i64 first;
    i64 count;
    char* parameter;
    char* gradient;
    char* state[3];
    // Of parameter, gradient and states.
    u8 dtype[8];
};

struct Update {
    float s[12];
    int flag[8];
    i64 tensors;
    One of[TENSORS];
};

// What of the views is dense goes by number of element; the rest is walked by strides.
struct UpdateStrided {
    float s[12];
    int flag[8];
    i64 count;
    i64 rank;
    u32 shape[RANK];
    Operand o[5];
};

DEVICE float lerp(float a, float b, float weight) {
    return fabsf(weight) < 0.5f ? a + weight * (b - a) : b - (b - a) * (1.0f - weight);
}

// What an operation of the framework's step leaves of its result: parameters of bf16 and f16 are stepped in their own type,
// rounded after each operation. Its fused steps compute in f32.
struct Whole {
    DEVICE float operator()(float x) const { return x; }
};
struct Rounded {
    int dtype;
    DEVICE float operator()(float x) const { return dtype == F32 ? x : dtype == BF16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x)); }
};

// flag: 0 maximize, 1 decays, 5 fused; s: 0 decay.
template <class P, class R> DEVICE float decayed(const P& p, R r, float x, float g) {
    g = p.flag[0] ? -g : g;
    return p.flag[1] ? r(g + p.s[0] * x) : g;
}

// flag: 2 has momentum, 3 first step, 4 nesterov; s: 1 -lr, 2 momentum, 3 1 - dampening.
struct Sgd {
    enum { states = 1 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        if (p.flag[2]) {
            state[0] = p.flag[3] ? g : r(r(state[0] * p.s[2]) + p.s[3] * g);
            g = p.flag[4] ? r(g + p.s[2] * state[0]) : state[0];
        }
        x = x + p.s[1] * g;
    }
};

// flag: 2 shrinks, 3 amsgrad; s: 1 shrink, 2 1 - beta1, 3 beta2, 4 1 - beta2, 5 -step size, 6 correction, 7 eps.
struct Adam {
    enum { states = 3 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        x = p.flag[2] ? r(x * p.s[1]) : x;
        state[0] = r(lerp(state[0], g, p.s[2]));
        state[1] = r(r(state[1] * p.s[3]) + p.s[4] * g * g);
        float square = state[1];
        if (p.flag[3]) {
            state[2] = square > state[2] || is_nan(square) ? square : state[2];
            square = state[2];
        }
        x = x + p.s[5] * state[0] / r(r(r(sqrtf(square)) / p.s[6]) + p.s[7]);
    }
};

// flag: 2 momentum, 3 centred; s: 1 alpha, 2 1 - alpha, 3 -lr, 4 momentum, 5 eps. States: square, [buffer], [average].
struct Rmsprop {
    enum { states = 3 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        state[0] = state[0] * p.s[1] + p.s[2] * g * g;
        float square = state[0];
        if (p.flag[3]) {
            float& average = p.flag[2] ? state[2] : state[1];
            average = lerp(average, g, p.s[2]);
            square = square - average * average;
        }
        float spread = sqrtf(square) + p.s[5];
        if (p.flag[2]) {
            state[1] = state[1] * p.s[4] + g / spread;
            x = x + p.s[3] * state[1];
        } else {
            x = x + p.s[3] * g / spread;
        }
    }
};

// s: 1 -rate, 2 eps.
struct Adagrad {
    enum { states = 1 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        state[0] = state[0] + g * g;
        x = x + g * p.s[1] / (sqrtf(state[0]) + p.s[2]);
    }
};

// Moments as Adam keeps them. flag: 2 shrinks; s: 1 shrink, 2 1 - beta1, 3 beta2, 4 1 - beta2, 5 eps.
template <class P> DEVICE void moments(const P& p, float& x, float g, float* state) {
    x = p.flag[2] ? x * p.s[1] : x;
    state[0] = lerp(state[0], g, p.s[2]);
    state[1] = state[1] * p.s[3] + p.s[4] * g * g;
}

// s: 6 second correction, 7 and 8 factors of gradient and mean.
struct Nadam {
    enum { states = 2 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        moments(p, x, g, state);
        float root = sqrtf(state[1] / p.s[6]) + p.s[5];
        x = x + p.s[7] * g / root + p.s[8] * state[0] / root;
    }
};

// flag: 3 rectified; s: 6 -step size, 7 rectification.
struct Radam {
    enum { states = 2 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        moments(p, x, g, state);
        x = x + p.s[6] * state[0] * (p.flag[3] ? p.s[7] / (sqrtf(state[1]) + p.s[5]) : 1.0f);
    }
};

// s: 6 -step size.
struct Adamax {
    enum { states = 2 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        state[0] = lerp(state[0], g, p.s[2]);
        float old = state[1] * p.s[3], now = fabsf(g) + p.s[5];
        state[1] = old > now || is_nan(old) ? old : now;
        x = x + p.s[6] * state[0] / state[1];
    }
};

// s: 1 rho, 2 1 - rho, 3 -lr, 4 eps.
struct Adadelta {
    enum { states = 2 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        state[0] = state[0] * p.s[1] + p.s[2] * g * g;
        float delta = sqrtf(state[1] + p.s[4]) / sqrtf(state[0] + p.s[4]) * g;
        x = x + p.s[3] * delta;
        state[1] = state[1] * p.s[1] + p.s[2] * delta * delta;
    }
};

// s: 1 shrink, 2 -rate, 3 share of the parameter in the average.
struct Asgd {
    enum { states = 1 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        x = x * p.s[1] + p.s[2] * g;
        state[0] = p.s[3] == 1.0f ? x : state[0] + (x - state[0]) * p.s[3];
    }
};

// flag: 2 first step; s: 1 and 2 factors, 3 and 4 limits, 5 the first step's size. States: gradient, size.
struct Rprop {
    enum { states = 2 };
    template <class P, class R> static DEVICE void step(const P& p, R r, float& x, float g, float* state) {
        g = decayed(p, r, x, g);
        float turn = g * state[0], factor = turn > 0.0f ? p.s[2] : turn < 0.0f ? p.s[1] : 1.0f;
        float size = (p.flag[2] ? p.s[5] : state[1]) * factor;
        state[1] = size < p.s[3] ? p.s[3] : size > p.s[4] ? p.s[4] : size;
        state[0] = turn < 0.0f ? 0.0f : g;
        float sign = state[0] > 0.0f ? 1.0f : state[0] < 0.0f ? -1.0f : state[0] * 0.0f;
        x = x - sign * state[1];
    }
};

// Elements of one tensor; ALL_F32 says that everything is f32.
template <class S, bool ALL_F32, class R> DEVICE void update_range(const Update& p, R r, const One& of, i64 start, i64 end) {
    int dtype[5];
    UNROLL for (int k = 0; k < S::states + 2; k++) dtype[k] = ALL_F32 ? F32 : of.dtype[k];
    ONCE for (i64 i = start + threadIdx.x; i < end; i += blockDim.x) {
        float x = load_real(of.parameter, dtype[0], i), state[3] = {0.0f, 0.0f, 0.0f};
        UNROLL for (int k = 0; k < S::states; k++) {
            if (of.state[k]) state[k] = load_real(of.state[k], dtype[k + 2], i);
        }
        S::step(p, r, x, load_real(of.gradient, dtype[1], i), state);
        store_real(of.parameter, dtype[0], i, x);
        UNROLL for (int k = 0; k < S::states; k++) {
            if (of.state[k]) store_real(of.state[k], dtype[k + 2], i, state[k]);
        }
    }
}

template <class S> DEVICE void update(const Update& p) {
    int low = 0, high = (int)p.tensors - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (p.of[middle].first <= (i64)blockIdx.x) low = middle; else high = middle - 1;
    }
    const One& of = p.of[low];
    i64 start = ((i64)blockIdx.x - of.first) * CHUNK, end = start + CHUNK < of.count ? start + CHUNK : of.count;
    bool all_f32 = true;
    for (int k = 0; k < 5; k++) all_f32 = all_f32 && of.dtype[k] == F32;
    if (all_f32) update_range<S, true>(p, Whole{}, of, start, end);
    else update_range<S, false>(p, Rounded{p.flag[5] ? F32 : of.dtype[0]}, of, start, end);
}

template <class S> DEVICE void update_strided(const UpdateStrided& p) {
    ONCE for (i64 i = first_thread(); i < p.count; i += all_threads()) {
        i64 at[5] = {0, 0, 0, 0, 0}, rest = i;
        ONCE for (int d = (int)p.rank - 1; d >= 0; d--) {
            i64 c = take(rest, p.shape[d], p.count <= 0xffffffffll);
            UNROLL for (int k = 0; k < 5; k++) at[k] += c * p.o[k].stride[d];
        }
        float x = load<float>(p.o[0], at[0]), state[3] = {0.0f, 0.0f, 0.0f};
        UNROLL for (int k = 0; k < S::states; k++) {
            if (!p.o[k + 2].number) state[k] = load<float>(p.o[k + 2], at[k + 2]);
        }
        S::step(p, Rounded{p.flag[5] ? F32 : p.o[0].dtype}, x, load<float>(p.o[1], at[1]), state);
        store<float>(p.o[0], at[0], x);
        UNROLL for (int k = 0; k < S::states; k++) {
            if (!p.o[k + 2].number) store<float>(p.o[k + 2], at[k + 2], state[k]);
        }
    }
}

KERNEL(update_sgd, Update, 256) { update<Sgd>(p); }
KERNEL(update_adam, Update, 256) { update<Adam>(p); }
KERNEL(update_rmsprop, Update, 256) { update<Rmsprop>(p); }
KERNEL(update_adagrad, Update, 256) { update<Adagrad>(p); }
KERNEL(update_nadam, Update, 256) { update<Nadam>(p); }
KERNEL(update_radam, Update, 256) { update<Radam>(p); }
KERNEL(update_adamax, Update, 256) { update<Adamax>(p); }
KERNEL(update_adadelta, Update, 256) { update<Adadelta>(p); }
KERNEL(update_asgd, Update, 256) { update<Asgd>(p); }
KERNEL(update_rprop, Update, 256) { update<Rprop>(p); }
KERNEL(strided_nadam, UpdateStrided, 256) { update_strided<Nadam>(p); }
KERNEL(strided_radam, UpdateStrided, 256) { update_strided<Radam>(p); }
KERNEL(strided_adamax, UpdateStrided, 256) { update_strided<Adamax>(p); }
KERNEL(strided_adadelta, UpdateStrided, 256) { update_strided<Adadelta>(p); }
KERNEL(strided_asgd, UpdateStrided, 256) { update_strided<Asgd>(p); }
KERNEL(strided_rprop, UpdateStrided, 256) { update_strided<Rprop>(p); }
KERNEL(strided_sgd, UpdateStrided, 256) { update_strided<Sgd>(p); }
KERNEL(strided_adam, UpdateStrided, 256) { update_strided<Adam>(p); }
KERNEL(strided_rmsprop, UpdateStrided, 256) { update_strided<Rmsprop>(p); }
KERNEL(strided_adagrad, UpdateStrided, 256) { update_strided<Adagrad>(p); }
