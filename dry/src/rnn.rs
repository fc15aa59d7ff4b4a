//! cuDNN's recurrent networks: descriptors that remember, because their sizes decide how PyTorch
//! lays weights out.

use std::ffi::{c_int, c_void};

use crate::sys::{SUCCESS, Status, put};

type Handle = *mut c_void;

/// A tensor descriptor (or a filter's): type, lengths and strides.
#[derive(Default)]
pub struct Tensor {
    kind: c_int,
    dims: Vec<c_int>,
    strides: Vec<c_int>,
}

/// A recurrent network's descriptor.
#[derive(Default)]
pub struct Network {
    /// 0 and 1 are the plain cells, 2 is LSTM, 3 GRU.
    cell: c_int,
    bias: c_int,
    bidirectional: bool,
    kind: c_int,
    input: usize,
    hidden: usize,
    projected: usize,
    layers: usize,
}

/// A batch of sequences.
#[derive(Default)]
pub struct Data {
    steps: usize,
    batch: usize,
}

macro_rules! descriptors {
    ($($create:ident $destroy:ident $t:ty;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $create(out: *mut Handle) -> Status {
            unsafe { put(out, Box::into_raw(Box::<$t>::default()).cast()) };
            SUCCESS
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $destroy(descriptor: Handle) -> Status {
            if !descriptor.is_null() {
                // SAFETY: made by the function above.
                drop(unsafe { Box::from_raw(descriptor.cast::<$t>()) });
            }
            SUCCESS
        }
    )* };
}

descriptors! {
    cudnnCreateTensorDescriptor cudnnDestroyTensorDescriptor Tensor;
    cudnnCreateFilterDescriptor cudnnDestroyFilterDescriptor Tensor;
    cudnnCreateRNNDescriptor cudnnDestroyRNNDescriptor Network;
    cudnnCreateRNNDataDescriptor cudnnDestroyRNNDataDescriptor Data;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetTensorNdDescriptor(
    tensor: *mut Tensor,
    kind: c_int,
    count: c_int,
    dims: *const c_int,
    strides: *const c_int,
) -> Status {
    let copy = |p: *const c_int| unsafe { std::slice::from_raw_parts(p, count as usize) }.to_vec();
    // SAFETY: the caller gives a descriptor of ours and `count` lengths and strides.
    unsafe { *tensor = Tensor { kind, dims: copy(dims), strides: copy(strides) } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetFilterNdDescriptor(
    filter: *mut Tensor,
    kind: c_int,
    _format: c_int,
    count: c_int,
    dims: *const c_int,
) -> Status {
    // SAFETY: the caller gives a descriptor of ours and `count` lengths.
    let dims = unsafe { std::slice::from_raw_parts(dims, count as usize) }.to_vec();
    unsafe { *filter = Tensor { kind, strides: vec![1; dims.len()], dims } };
    SUCCESS
}

unsafe fn put_all(out: *mut c_int, values: &[c_int], room: c_int) {
    if !out.is_null() {
        for (i, value) in values.iter().take(room as usize).enumerate() {
            // SAFETY: the caller gives `room` elements.
            unsafe { out.add(i).write(*value) };
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetTensorNdDescriptor(
    tensor: *const Tensor,
    room: c_int,
    kind: *mut c_int,
    count: *mut c_int,
    dims: *mut c_int,
    strides: *mut c_int,
) -> Status {
    // SAFETY: the caller gives a descriptor of ours.
    let tensor = unsafe { &*tensor };
    unsafe {
        put(kind, tensor.kind);
        put(count, tensor.dims.len() as c_int);
        put_all(dims, &tensor.dims, room);
        put_all(strides, &tensor.strides, room);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetFilterNdDescriptor(
    filter: *const Tensor,
    room: c_int,
    kind: *mut c_int,
    format: *mut c_int,
    count: *mut c_int,
    dims: *mut c_int,
) -> Status {
    unsafe {
        put(format, 0);
        cudnnGetTensorNdDescriptor(filter, room, kind, count, dims, std::ptr::null_mut())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetRNNDescriptor_v8(
    network: *mut Network,
    _algorithm: c_int,
    cell: c_int,
    bias: c_int,
    direction: c_int,
    _input_mode: c_int,
    kind: c_int,
    _precision: c_int,
    _maths: c_int,
    input: i32,
    hidden: i32,
    projected: i32,
    layers: i32,
    _dropout: Handle,
    _flags: u32,
) -> Status {
    // SAFETY: the caller gives a descriptor of ours.
    unsafe {
        *network = Network {
            cell,
            bias,
            bidirectional: direction == 1,
            kind,
            input: input as usize,
            hidden: hidden as usize,
            projected: projected as usize,
            layers: layers as usize,
        }
    };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetRNNDataDescriptor(
    data: *mut Data,
    _kind: c_int,
    _layout: c_int,
    steps: c_int,
    batch: c_int,
) -> Status {
    // SAFETY: the caller gives a descriptor of ours.
    unsafe { *data = Data { steps: steps as usize, batch: batch as usize } };
    SUCCESS
}

impl Network {
    fn directions(&self) -> usize {
        1 + self.bidirectional as usize
    }

    fn gates(&self) -> usize {
        match self.cell {
            2 => 4,
            3 => 3,
            _ => 1,
        }
    }

    /// Elements of what a step gives to the next.
    fn output(&self) -> usize {
        if self.projected > 0 { self.projected } else { self.hidden }
    }

    fn is_projected(&self) -> bool {
        self.projected > 0 && self.projected != self.hidden
    }

    fn element(&self) -> usize {
        match self.kind {
            1 => 8,
            2 | 9 => 2,
            _ => 4,
        }
    }

    /// Rows and columns of each matrix of one layer in one direction: input gates, recurrent gates,
    /// projection.
    fn matrices(&self, pseudo_layer: usize) -> Vec<(usize, usize)> {
        let first = pseudo_layer < self.directions();
        let input = if first { self.input } else { self.output() * self.directions() };
        let mut all = vec![(self.hidden, input); self.gates()];
        all.extend(vec![(self.hidden, self.output()); self.gates()]);
        if self.is_projected() {
            all.push((self.projected, self.hidden));
        }
        all
    }

    fn biases(&self) -> usize {
        match self.bias {
            0 => 0,
            3 => 2 * self.gates(),
            _ => 2 * self.gates(),
        }
    }

    fn pseudo_layers(&self) -> usize {
        self.layers * self.directions()
    }

    fn weights(&self) -> usize {
        let all = (0..self.pseudo_layers()).flat_map(|l| self.matrices(l));
        all.map(|(r, c)| r * c).sum()
    }

    fn weight_bytes(&self) -> usize {
        (self.weights() + self.pseudo_layers() * self.biases() * self.hidden) * self.element()
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetRNNWeightSpaceSize(
    _handle: Handle,
    network: *const Network,
    out: *mut usize,
) -> Status {
    // SAFETY: the caller gives a descriptor of ours.
    unsafe { put(out, (*network).weight_bytes()) };
    SUCCESS
}

/// Where a matrix and its bias lie in the weight space: all matrices by layer, then all biases by
/// layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetRNNWeightParams(
    _handle: Handle,
    network: *const Network,
    pseudo_layer: i32,
    _bytes: usize,
    space: usize,
    linear: i32,
    matrix: *mut Tensor,
    matrix_at: *mut usize,
    bias: *mut Tensor,
    bias_at: *mut usize,
) -> Status {
    // SAFETY: the caller gives a descriptor of ours.
    let network = unsafe { &*network };
    let (layer, linear) = (pseudo_layer as usize, linear as usize);
    let element = network.element();
    let matrices = network.matrices(layer);
    let tensor = |rows: usize, columns: usize| Tensor {
        kind: network.kind,
        dims: vec![1, rows as c_int, columns as c_int],
        strides: vec![(rows * columns) as c_int, columns as c_int, 1],
    };
    let before: usize =
        (0..layer).flat_map(|l| network.matrices(l)).map(|(rows, columns)| rows * columns).sum();
    let Some(&(rows, columns)) = matrices.get(linear) else {
        unsafe {
            put(matrix_at, 0);
            put(bias_at, 0);
        }
        return SUCCESS;
    };
    let inside: usize = matrices[..linear].iter().map(|(r, c)| r * c).sum();
    // SAFETY: the caller gives descriptors of ours, or null.
    unsafe {
        put(matrix_at, space + (before + inside) * element);
        if let Some(out) = matrix.as_mut() {
            *out = tensor(rows, columns);
        }
        if linear < network.biases() {
            let ahead = network.weights() + (layer * network.biases() + linear) * network.hidden;
            put(bias_at, space + ahead * element);
            if let Some(out) = bias.as_mut() {
                *out = tensor(network.hidden, 1);
            }
        } else {
            put(bias_at, 0);
        }
    }
    SUCCESS
}

/// Workspace and reserve. cuDNN does not say how it counts: here the reserve holds, for each step,
/// layer and direction, every gate, the cell state and the output; the workspace holds the gates of
/// one layer. An estimate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetRNNTempSpaceSizes(
    _handle: Handle,
    network: *const Network,
    training: c_int,
    data: *const Data,
    workspace: *mut usize,
    reserve: *mut usize,
) -> Status {
    // SAFETY: the caller gives descriptors of ours.
    let (network, data) = unsafe { (&*network, &*data) };
    let layer = data.steps * data.batch * network.hidden * network.element();
    let held = network.gates() + 2;
    crate::log::estimated("cudnnGetRNNTempSpaceSizes");
    unsafe {
        put(workspace, layer * network.directions() * network.gates());
        put(reserve, if training == 1 { layer * network.pseudo_layers() * held } else { 0 });
    }
    SUCCESS
}
