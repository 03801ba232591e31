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
param!(
    u32, i32, u64, f32, Mat, Step, Rows, Products, ExpertMats, Mixing, Pooling, Attending, Flash, Gemm,
    Streams, Ahead, Grouped
);

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
    pub x_codes: Ptr,
    pub y_codes: Ptr,
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
    pub h_codes: Ptr,
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
    pub codes: Ptr,
    pub streams: u32,
    pub hidden: u32,
    pub iterations: u32,
    pub hc_eps: f32,
    pub rms_eps: f32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Streams {
    pub x: Ptr,
    pub y: Ptr,
    pub mix: Ptr,
    pub w: Ptr,
    pub shares: Ptr,
    pub hidden: u32,
}

/// Ranges of memory that the next kernels read.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Ahead {
    pub at: [Ptr; 8],
    pub bytes: [u32; 8],
    pub count: u32,
}

impl Ahead {
    /// Adds the first bytes of a matrix, as many as keep the whole below `most`.
    pub fn add(&mut self, m: &Mat, most: u32) {
        let have: u32 = self.bytes.iter().sum();
        let bytes = u64::from(m.rows) * u64::from(m.row_bytes);
        let bytes = (bytes.min(u64::from(most.saturating_sub(have))) as u32) & !15;
        let free = self.at.get_mut(self.count as usize).zip(self.bytes.get_mut(self.count as usize));
        if let Some((at, n)) = free
            && bytes > 0
        {
            (*at, *n) = (m.data, bytes);
            self.count += 1;
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Grouped {
    pub e: ExpertMats,
    pub tiles: Ptr,
    pub order: Ptr,
    pub total: Ptr,
    pub own: u32,
}

/// Tokens that share an expanded row in `expert_up_tiles` and `expert_down_tiles`.
pub const SHARE: u32 = 4;

/// Values that a block of 64 channels leaves in `streams_step`.
pub const SHARES: usize = 36;

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

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Flash {
    pub a: Attending,
    pub fresh: Ptr,
    pub part: Ptr,
    pub stats: Ptr,
    pub codes: Ptr,
    pub splits: u32,
    pub next: Ahead,
}

/// Bytes of dynamic shared memory that `flash_*` take for heads of `dim` channels.
pub const fn flash_shared(dim: u32) -> u32 {
    2 * 2 * 32 * (dim + 8) + 4 * 32 * 36 + 2 * 32 * 40 + 4 * 32
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Gemm {
    pub m: Mat,
    pub up: Mat,
    pub shared: Mat,
    pub shared_up: Mat,
    pub x: Ptr,
    pub y: Ptr,
    pub mid: Ptr,
    pub tiles: Ptr,
    pub order: Ptr,
    pub total: Ptr,
    pub gates: Ptr,
    pub x_stride: u32,
    pub y_stride: u32,
    pub group_rows: u32,
    pub tokens: u32,
    pub experts: u32,
    pub k: u32,
    pub splits: u32,
    pub clamp: f32,
}

/// Rows of a matrix and columns that one step of `gemm_*` takes.
pub const GEMM_ROWS: u32 = 128;
pub const GEMM_COLS: u32 = 64;

/// Bytes of dynamic shared memory that `gemm_*` take for tiles of `tokens` tokens.
pub const fn gemm_shared(tokens: u32) -> u32 {
    2 * 2 * (GEMM_ROWS + tokens) * (GEMM_COLS + 8)
}

/// Bytes of dynamic shared memory that `index_scores_128` takes.
pub const fn index_shared(heads: u32) -> u32 {
    2 * (128 + heads) * 136
}

/// Bytes of dynamic shared memory that the kernels of gate and up take for `tokens` tokens.
pub const fn expert_up_shared(hidden: u32, tokens: u32) -> u32 {
    384 * 16 * 8 + quantised_bytes(tokens, hidden)
}

/// Blocks of the shared expert's `own` rows, and of `rows` rows of a routed one.
pub const fn expert_blocks(own: u32, rows: u32) -> (u32, u32) {
    (own.div_ceil(32), rows.div_ceil(64))
}

/// Rows of a block of `integer_*`, at most.
pub const INTEGER_ROWS: u32 = 128;

/// Bytes of `tokens` rows of `cols` activations in 8 bits.
pub const fn quantised_bytes(tokens: u32, cols: u32) -> u32 {
    tokens * (cols + cols / 8 + cols / 4)
}
