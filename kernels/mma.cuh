// Matrix products of a warp on tensor cores, for bf16 and f16 with sums in f32.
//
// PTX names the elements that each lane holds (PTX ISA, "Matrix fragments for mma.m16n8k16"). With g = lane / 4, t = lane % 4,
// two neighbours in a word: A, 16 by 16, has rows g and g + 8 at columns 2t in words 0 and 1, at columns 2t + 8 in words 2 and
// 3; B, 16 by 8, has column g at rows 2t in word 0, at rows 2t + 8 in word 1; C, 16 by 8, has row g at columns 2t and 2t + 1,
// then row g + 8. On the host each lane reads the others' words from where this puts them.

// Two numbers rounded to TYPE, the first in the lower half.
template <int TYPE> DEVICE u32 pack(float low, float high) {
#if defined(SHIM) || __CUDA_ARCH__ < 800
    return TYPE == BF16 ? to_bf16(low) | (u32)to_bf16(high) << 16 : to_f16(low) | (u32)to_f16(high) << 16;
#else
    u32 both;
    if (TYPE == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

#ifdef SHIM
struct Words {
    u32 a[4], b[2];
};

template <int TYPE> inline float half_of(u32 word, int at) {
    u16 bits = (u16)(word >> 16 * at);
    return TYPE == BF16 ? from_bf16(bits) : from_f16(bits);
}

template <int TYPE> inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    // Two of each, in turn: no lane is ahead of another by more than one product.
    static Words all[1024][2];
    static u32 turns[1024];
    u32 own = shim::thread_number(), turn = turns[own]++ & 1, warp = own / 32 * 32, g = own % 32 / 4, t = own % 4;
    all[own][turn] = Words{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    SYNC();
    for (u32 i = 0; i < 4; i++) {
        u32 lower = i / 2, column = 2 * t + i % 2;
        double sum = c[i];
        for (u32 k = 0; k < 16; k++) {
            u32 lane = k % 8 / 2, far = k / 8;
            sum += (double)half_of<TYPE>(all[warp + 4 * g + lane][turn].a[lower + 2 * far], k % 2) *
                   half_of<TYPE>(all[warp + 4 * column + lane][turn].b[far], k % 2);
        }
        c[i] = (float)sum;
    }
}
#elif __CUDA_ARCH__ < 800
// Without such instructions; emit/attention.rs launches nothing of this there.
template <int TYPE> DEVICE void multiply(float (&)[4], const u32 (&)[4], u32, u32) { asm volatile("trap;"); }
#else
template <int TYPE> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (TYPE == BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
