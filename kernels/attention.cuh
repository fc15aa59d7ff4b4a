// What the kernels of attention have in common.
//
// Nothing of the size of the attention matrix is kept: forward leaves the logarithm of each row's sum, backward computes
// probabilities from it again and draws the same mask. A block owns a tile of queries (of keys for their gradients) and goes
// through the other side in order.

struct Attention {
    int batch;
    int heads;
    int queries;
    int keys;
    int width;
    int value_width;
    // Query heads for each head of keys, of values.
    int group[2];
    int causal;
    int dropout;
    float scale;
    float factor;
    Random random;
    // Strides: batch, head, row, column.
    Operand q;
    Operand k;
    Operand v;
    Operand bias;
    Operand out;
    // Strides: batch, head, row.
    Operand sums;
    Operand gradient;
    Operand dq;
    Operand dk;
    Operand dv;
    // Of each query, the dot product of result and its gradient, where gradients of q, k and v are computed.
    float* delta;
};

DEVICE float larger_of(float a, float b) { return b > a || is_nan(b) ? b : a; }

DEVICE i64 head_of(const Operand& o, int b, int h) { return b * o.stride[0] + h * o.stride[1]; }

// The tile that a block owns: its first row, and whose it is.
struct Owned {
    int first, head, batch;
};
DEVICE Owned owned(int rows, int heads, int tile) {
    int tiles = (rows + tile - 1) / tile, of = (int)(blockIdx.x / tiles);
    return Owned{(int)(blockIdx.x % tiles) * tile, of % heads, of / heads};
}

// Keys that any query before `last` may see.
DEVICE int seen(const Attention& p, int last) { return p.causal && last < p.keys ? last : p.keys; }
