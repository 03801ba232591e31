//! What the kernels take by value; mirrors `kernels/*.cuh` field by field.

/// A pointer into device memory.
pub type Ptr = u64;

/// What may be passed to a kernel by value.
///
/// # Safety
/// `#[repr(C)]` without padding that the kernel reads, of the same layout as the kernel's parameter.
pub unsafe trait Param: Copy {}

macro_rules! param {
    ($($t:ty),*) => { $(
        // SAFETY: a scalar, or a repr(C) struct that mirrors its CUDA namesake.
        unsafe impl Param for $t {}
    )* };
}
param!(u32, i32, u64, f32, Mat, Step, Rows, Products, ExpertMats, Mixing, Pooling, Attending);

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Mat {
    pub data: Ptr,
    pub heads_at: u64,
    pub format: u32,
    pub rows: u32,
    pub cols: u32,
    pub row_bytes: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Step {
    pub tokens: Ptr,
    pub pos: Ptr,
    pub segment_of: Ptr,
    pub outputs: Ptr,
    pub segments: Ptr,
    pub windows: [Ptr; 2],
    pub tables: Ptr,
    pub pages: Ptr,
    pub frontiers: Ptr,
    pub page_bytes: u64,
    pub frontier_bytes: u64,
    pub table_max: u32,
    pub rows: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Rows {
    pub packed: u32,
    pub qat: u32,
    pub dim: u32,
    pub rope: u32,
    pub main_bytes: u32,
    pub index_dim: u32,
    pub index_bytes: u32,
    pub window: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Product {
    pub m: Mat,
    pub x: Ptr,
    pub y: Ptr,
    pub x_stride: u32,
    pub y_stride: u32,
    pub group_rows: u32,
    pub first_block: u32,
}

/// Products that one launch holds.
pub const PRODUCTS: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Products {
    pub job: [Product; PRODUCTS],
    pub count: u32,
    pub tokens: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ExpertMats {
    pub gate: Mat,
    pub up: Mat,
    pub down: Mat,
    pub shared_gate: Mat,
    pub shared_up: Mat,
    pub shared_down: Mat,
    pub h: Ptr,
    pub experts: Ptr,
    pub gates: Ptr,
    pub mid: Ptr,
    pub parts: Ptr,
    pub y: Ptr,
    pub k: u32,
    pub width: u32,
    pub hidden: u32,
    pub clamp: f32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Mixing {
    pub x: Ptr,
    pub m: Ptr,
    pub base: Ptr,
    pub scale: Ptr,
    pub norm: Ptr,
    pub h: Ptr,
    pub mix: Ptr,
    pub streams: u32,
    pub hidden: u32,
    pub iterations: u32,
    pub hc_eps: f32,
    pub rms_eps: f32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Pooling {
    pub a: Ptr,
    pub z: Ptr,
    pub ape: Ptr,
    pub state: Ptr,
    pub norm: Ptr,
    pub freqs: Ptr,
    pub acc_at: u64,
    pub rows_at: u64,
    pub ratio: u32,
    pub width: u32,
    pub overlap: u32,
    pub index: u32,
    pub stride: u32,
    pub eps: f32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Attending {
    pub q: Ptr,
    pub kv: Ptr,
    pub selected: Ptr,
    pub sinks: Ptr,
    pub freqs: Ptr,
    pub o: Ptr,
    pub ring_at: u64,
    pub rows_at: u64,
    pub ratio: u32,
    pub topk: u32,
    pub heads: u32,
    pub capacity: u32,
    pub scale: f32,
}
