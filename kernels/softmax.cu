// Softmax and its logarithm along one dimension, their gradients, and losses over classes. A block for each row.
//
// Denominators are kept in double precision.

// o: out, in. flags: 1 for the logarithm, 2 for zeros where a row is nothing but minus infinities.
KERNEL(softmax, Rows, 512) {
    SHARED double slots[512];
    ONCE for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        i64 to = row_place(p, p.o[0], row), from = row_place(p, p.o[1], row);
        float most;
        double sum;
        extent_of(p, p.o[1], from, slots, most, sum);
        float log_sum = (float)log(sum), scale = (float)(1.0 / sum);
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
            float x = at(p.o[1], from, i);
            float y = (p.flags & 1) ? (x - most) - log_sum : (p.flags & 2) && most == -INF ? 0.0f : expf(x - most) * scale;
            put(p.o[0], to, i, y);
        }
    }
}

// o: out, gradient, saved.
KERNEL(softmax_backward, Rows, 512) {
    SHARED double slots[512];
    ONCE for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        i64 to = row_place(p, p.o[0], row), from = row_place(p, p.o[1], row), with = row_place(p, p.o[2], row);
        double total = 0.0;
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
            double g = at(p.o[1], from, i);
            total += (p.flags & 1) ? g : g * (double)at(p.o[2], with, i);
        }
        float sum = (float)block_sum(total, slots);
        ONCE for (i64 i = threadIdx.x; i < p.length; i += blockDim.x) {
            float g = at(p.o[1], from, i), y = at(p.o[2], with, i);
            put(p.o[0], to, i, (p.flags & 1) ? g - expf(y) * sum : y * (g - sum));
        }
    }
}

enum { NONE, MEAN, SUM };

// The class of a target, or -1 where it is ignored; a bad one is reported and ignored.
DEVICE i64 class_of(const Rows& p, const Operand& target, i64 row) {
    i64 class_ = load<i64>(target, row_place(p, target, row));
    if (class_ == p.k[0]) return -1;
    if (class_ < 0 || class_ >= p.k[2]) {
        *p.status = p.item;
        return -1;
    }
    return class_;
}

// One block. o: out, scores, target, weight by class, total weight. k: ignored class, reduction, classes, whether
// the scores are still to be made logarithms of probabilities.
KERNEL(likelihood, Rows, 512) {
    SHARED double slots[512];
    double sum = 0.0, weights = 0.0;
    if (p.k[3]) {
        // All threads share each row.
        ONCE for (i64 row = 0; row < p.rows; row++) {
            i64 c = class_of(p, p.o[2], row), scores = row_place(p, p.o[1], row);
            float most;
            double total, loss = 0.0;
            extent_of(p, p.o[1], scores, slots, most, total);
            if (c >= 0) {
                double weight = at(p.o[3], 0, c);
                loss = weight * ((double)most + log(total) - (double)at(p.o[1], scores, c));
                if (threadIdx.x == 0) {
                    sum += loss;
                    weights += weight;
                }
            }
            if (p.k[1] == NONE && threadIdx.x == 0) store<float>(p.o[0], row_place(p, p.o[0], row), (float)loss);
        }
    } else {
        ONCE for (i64 row = threadIdx.x; row < p.rows; row += blockDim.x) {
            i64 c = class_of(p, p.o[2], row);
            double loss = 0.0;
            if (c >= 0) {
                double weight = at(p.o[3], 0, c);
                loss = weight * -(double)at(p.o[1], row_place(p, p.o[1], row), c);
                weights += weight;
            }
            sum += loss;
            if (p.k[1] == NONE) store<float>(p.o[0], row_place(p, p.o[0], row), (float)loss);
        }
    }
    sum = block_sum(sum, slots);
    weights = block_sum(weights, slots);
    if (threadIdx.x == 0) {
        if (p.k[1] == SUM) store<float>(p.o[0], 0, (float)sum);
        if (p.k[1] == MEAN) store<float>(p.o[0], 0, (float)(sum / weights));
        if (!p.o[4].number) store<float>(p.o[4], 0, p.k[1] == NONE ? 0.0f : (float)weights);
    }
}

// One block, over zeros. o: score gradients, incoming gradient, target, weight, total weight (a number: to be summed here).
KERNEL(likelihood_backward, Rows, 512) {
    SHARED double slots[512];
    float divisor = 1.0f;
    if (p.k[1] == MEAN) {
        double weights = 0.0;
        if (p.o[4].number) {
            ONCE for (i64 row = threadIdx.x; row < p.rows; row += blockDim.x) {
                i64 c = class_of(p, p.o[2], row);
                if (c >= 0) weights += (double)at(p.o[3], 0, c);
            }
            weights = block_sum(weights, slots);
        } else {
            weights = load<double>(p.o[4], 0);
        }
        divisor = (float)weights;
    }
    ONCE for (i64 row = threadIdx.x; row < p.rows; row += blockDim.x) {
        i64 c = class_of(p, p.o[2], row);
        if (c >= 0) {
            float g = load<float>(p.o[1], row_place(p, p.o[1], row)) / divisor;
            put(p.o[0], row_place(p, p.o[0], row), c, -at(p.o[3], 0, c) * g);
        }
    }
}

// One block. o: out, a, b; rows of one element; k[1] the reduction.
KERNEL(squared_error, Rows, 512) {
    SHARED double slots[512];
    double sum = 0.0;
    ONCE for (i64 row = threadIdx.x; row < p.rows; row += blockDim.x) {
        float d = load<float>(p.o[1], row_place(p, p.o[1], row)) - load<float>(p.o[2], row_place(p, p.o[2], row));
        sum += (double)(d * d);
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) store<float>(p.o[0], 0, (float)(p.k[1] == MEAN ? sum / (double)p.rows : sum));
}
