//! Convolutions of one element (1 x 1, stride 1) as matrix products.
//!
//! cuDNN's deterministic gradients of such weights take up to 17 times as long: on an H200, 1.82 ms
//! in place of 0.11 ms for 16 images of 56 x 56 with 256 channels in and 64 out, in f32.

use super::launch::{Actions, Conv, Gemm, Matrix, Pass};
use crate::backend::operators::KernelError;
use crate::backend::operators::view::View;
use crate::job::Dtype;

/// Stands beside cuDNN's numbers of algorithms, which are small.
pub const ALGORITHM: i32 = 1000;

/// The product of each image, if a convolution is one and its product is quicker: where that was
/// measured (ResNet-50's shapes on an H200, in f32).
///
/// `partial` is where gradients of weights of each image go, before [`join`] adds them.
#[must_use]
pub fn product(conv: &Conv, partial: *mut u8) -> Option<Gemm> {
    let p = &conv.params;
    let (inputs, outputs) = (i64::from(p.channels_in), i64::from(p.channels_out));
    let places = i64::from(p.out[0]) * i64::from(p.out[1]);
    let pointwise = p.kernel == [1, 1] && p.stride == [1, 1] && p.padding == [0, 0];
    // Steps of images, channels, rows and columns.
    let by_channel = |stride: &[i64], channels: i64| {
        (p.out[0] == 1 || stride[2] == i64::from(p.out[1]))
            && (p.out[1] == 1 || stride[3] == 1)
            && (channels == 1 || stride[1] >= places)
    };
    let dense = (inputs == 1 || p.w.stride[1] == 1) && (outputs == 1 || p.w.stride[0] == inputs);
    let quicker = match conv.pass {
        Pass::Forward => outputs > 64,
        Pass::BackInput => inputs.max(outputs) > 64,
        // Else the sum over images costs more than the products.
        Pass::BackWeight => 2 * inputs * outputs <= places * (inputs + outputs),
    };
    let fits = conv.dtype == Dtype::F32
        && pointwise
        && p.groups == 1
        && by_channel(&p.x.stride, inputs)
        && by_channel(&p.y.stride, outputs)
        && dense;
    if !fits || !quicker {
        return None;
    }
    let of = |data: *mut u8, row: i64, column: i64, batch: i64| Matrix { data, row, column, batch };
    let x = of(p.x.data, p.x.stride[1], 1, p.x.stride[0]);
    let y = of(p.y.data, p.y.stride[1], 1, p.y.stride[0]);
    let w = of(p.w.data, inputs, 1, 0);
    let turned = |m: Matrix| Matrix { row: m.column, column: m.row, ..m };
    let (m, k, n, a, b, c) = match conv.pass {
        Pass::Forward => (outputs, inputs, places, w, x, y),
        Pass::BackInput => (inputs, outputs, places, turned(w), y, x),
        Pass::BackWeight => {
            let each = of(partial, inputs, 1, inputs * outputs);
            (outputs, places, inputs, y, turned(x), each)
        }
    };
    let (dtype, batch, bias) = (conv.dtype, p.images, std::ptr::null_mut());
    Some(Gemm { dtype, m, n, k, batch, alpha: 1.0, beta: 0.0, a, b, c, bias })
}

/// The memory that a product's gradients of weights take, in bytes: images x out x in numbers.
#[must_use]
pub fn partial_bytes(conv: &Conv) -> u64 {
    let p = &conv.params;
    let size = i64::from(p.channels_in) * i64::from(p.channels_out) * p.images;
    if conv.pass == Pass::BackWeight { size as u64 * conv.dtype.size() } else { 0 }
}

/// Adds the gradients of all images, in their order.
///
/// # Errors
/// As other sums.
pub fn join(conv: &Conv, partial: *mut u8, actions: &mut Actions) -> Result<(), KernelError> {
    let p = &conv.params;
    let (images, size) = (p.images as usize, p.channels_in as usize * p.channels_out as usize);
    let view = |data: *mut u8, shape: Vec<usize>, stride: Vec<usize>| View {
        data,
        dtype: conv.dtype,
        shape,
        stride,
    };
    let from = view(partial, vec![images, size], vec![size, 1]);
    let out = view(p.w.data, vec![size], vec![1]);
    super::emit::reduce::sum(actions, &out, &from, &[true, false], 1.0)
}

#[cfg(test)]
mod tests {
    use super::super::params::{Convolution, Operand};
    use super::*;

    const IMAGES: i32 = 2;
    const IN: i32 = 3;
    const OUT: i32 = 66;
    const SIZE: [i32; 2] = [7, 5];

    fn operand(data: &mut [f32], stride: [i64; 4]) -> Operand {
        let mut o = Operand::number(0.0);
        (o.data, o.number) = (data.as_mut_ptr().cast(), 0);
        o.stride[..4].copy_from_slice(&stride);
        o
    }

    fn conv(pass: Pass, [x, w, y]: [&mut [f32]; 3]) -> Conv {
        let [rows, columns] = SIZE.map(i64::from);
        let dense =
            |channels: i32| [i64::from(channels) * rows * columns, rows * columns, columns, 1];
        let params = Convolution {
            images: i64::from(IMAGES),
            groups: 1,
            channels_in: IN,
            channels_out: OUT,
            size: SIZE,
            out: SIZE,
            kernel: [1, 1],
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            pad: 0,
            x: operand(x, dense(IN)),
            w: operand(w, [i64::from(IN), 1, 1, 1]),
            y: operand(y, dense(OUT)),
            bias: Operand::number(0.0),
        };
        Conv { pass, dtype: Dtype::F32, params }
    }

    /// What the library computes.
    fn multiply(g: &Gemm) {
        let at = |m: &Matrix, image: i64, row: i64, column: i64| {
            let offset = image * m.batch + row * m.row + column * m.column;
            m.data.cast::<f32>().wrapping_offset(offset as isize)
        };
        for image in 0..g.batch {
            for row in 0..g.m {
                for column in 0..g.n {
                    let term = |k: i64| {
                        // SAFETY: the operands are the test's, as large as the extents say.
                        unsafe { *at(&g.a, image, row, k) * *at(&g.b, image, k, column) }
                    };
                    let sum: f32 = (0..g.k).map(term).sum();
                    // SAFETY: as above.
                    unsafe { *at(&g.c, image, row, column) = sum };
                }
            }
        }
    }

    #[test]
    fn each_pass_is_a_product_of_each_image() {
        let places = SIZE[0] * SIZE[1];
        let numbers = |count: i32, step: i32| -> Vec<f32> {
            (0..count).map(|i| ((i * step) % 11 - 5) as f32).collect()
        };
        let (mut x, mut w) = (numbers(IMAGES * IN * places, 3), numbers(OUT * IN, 7));
        let mut y = numbers(IMAGES * OUT * places, 5);
        let at = |image: i32, channel: i32, channels: i32, place: i32| {
            ((image * channels + channel) * places + place) as usize
        };
        let all = |sum: &mut dyn FnMut(i32, i32, i32, i32)| {
            for image in 0..IMAGES {
                for out in 0..OUT {
                    for place in 0..places {
                        (0..IN).for_each(|input| sum(image, out, place, input));
                    }
                }
            }
        };
        let weight = |out: i32, input: i32| (out * IN + input) as usize;
        let (mut forward, mut back) = (vec![0.0; y.len()], vec![0.0; x.len()]);
        let mut of_weights = vec![0.0; w.len()];
        all(&mut |image, out, place, input| {
            let (from, to) = (at(image, input, IN, place), at(image, out, OUT, place));
            forward[to] += x[from] * w[weight(out, input)];
            back[from] += y[to] * w[weight(out, input)];
            of_weights[weight(out, input)] += y[to] * x[from];
        });

        let mut wrote = vec![0.0; y.len()];
        let of = conv(Pass::Forward, [&mut x, &mut w, &mut wrote]);
        multiply(&product(&of, std::ptr::null_mut()).expect("a product"));
        assert_eq!(wrote, forward);

        let mut wrote = vec![0.0; x.len()];
        let of = conv(Pass::BackInput, [&mut wrote, &mut w, &mut y]);
        multiply(&product(&of, std::ptr::null_mut()).expect("a product"));
        assert_eq!(wrote, back);

        let mut partial = vec![0.0f32; (IMAGES * OUT * IN) as usize];
        let of = conv(Pass::BackWeight, [&mut x, &mut w, &mut y]);
        assert_eq!(partial_bytes(&of), partial.len() as u64 * 4);
        multiply(&product(&of, partial.as_mut_ptr().cast()).expect("a product"));
        let (first, second) = partial.split_at((OUT * IN) as usize);
        let sums: Vec<f32> = first.iter().zip(second).map(|(a, b)| a + b).collect();
        assert_eq!(sums, of_weights);
    }

    #[test]
    fn other_convolutions_are_none() {
        let (mut x, mut w, mut y) = (vec![0.0; 1], vec![0.0; 1], vec![0.0; 1]);
        let of = conv(Pass::Forward, [&mut x, &mut w, &mut y]);
        let none = |change: &dyn Fn(&mut Conv)| {
            let mut other = of;
            change(&mut other);
            assert!(product(&other, std::ptr::null_mut()).is_none());
        };
        none(&|c| c.params.kernel = [1, 3]);
        none(&|c| c.params.stride = [2, 2]);
        none(&|c| c.params.padding = [0, 1]);
        none(&|c| c.params.groups = 2);
        none(&|c| c.dtype = Dtype::Bf16);
        // Channels last.
        none(&|c| c.params.y.stride[..4].copy_from_slice(&[66 * 35, 1, 66 * 5, 66]));
    }
}
