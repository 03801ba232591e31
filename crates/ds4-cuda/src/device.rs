//! The driver API, found at run time: one card, its context, one stream, memory, launches and graphs.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};

use cudarc::driver::{DriverError, result, sys};
use ds4_model::BackendError;
use ds4_model::backend::Result;

use crate::abi::{Param, Ptr};
use crate::artefacts;

/// Bytes of each of the pinned buffers that copies to and from the host go through.
const STAGING: usize = 32 << 20;
/// Uploads take turns between this many buffers, so that one fills while the other travels.
const TURNS: usize = 2;
/// A copy into a pinned buffer is shared among threads in parts of at least this many bytes.
const PART: usize = 2 << 20;
/// Threads that share such a copy, at most.
const THREADS: usize = 16;

/// Memory of the card, freed with it.
pub struct Memory {
    pub ptr: Ptr,
    pub bytes: u64,
    ctx: sys::CUcontext,
}

// SAFETY: a context handle may be used from any thread once it is made current there, which `drop` does.
unsafe impl Send for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::allocate` in this context, and freed only here. A failure leaves nothing to do.
        unsafe {
            if result::ctx::set_current(self.ctx).is_ok() {
                let _ = result::free_sync(self.ptr);
            }
        }
    }
}

/// Page-locked host memory, which the card copies from and to without a detour.
struct Pinned {
    ptr: *mut u8,
    /// Recorded behind the last copy that used it.
    used: sys::CUevent,
    ctx: sys::CUcontext,
}

impl Pinned {
    /// # Safety
    /// `ctx` is current.
    unsafe fn new(ctx: sys::CUcontext) -> std::result::Result<Pinned, DriverError> {
        let used = result::event::create(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)?;
        // SAFETY: the context is current.
        let ptr = unsafe { result::malloc_host(STAGING, 0) }?.cast();
        Ok(Pinned { ptr, used, ctx })
    }
}

/// `from` into `to`, by several threads where it is long: one thread does not keep up with the bus.
fn copy_shared(from: &[u8], to: &mut [u8]) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS));
    let each = from.len().div_ceil(threads).max(PART);
    if from.len() <= PART {
        return to.copy_from_slice(from);
    }
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(each).zip(to.chunks_mut(each)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::open` in this context, and freed only here.
        unsafe {
            if result::ctx::set_current(self.ctx).is_ok() {
                let _ = result::free_host(self.ptr.cast());
                let _ = result::event::destroy(self.used);
            }
        }
    }
}

pub struct Device {
    pub name: String,
    ctx: sys::CUcontext,
    stream: sys::CUstream,
    module: sys::CUmodule,
    functions: HashMap<&'static str, sys::CUfunction>,
    /// Whether a kernel may start while the one before it ends; each waits for it itself (`wait_for_previous`).
    overlaps: bool,
    uploads: [Pinned; TURNS],
    turn: Cell<usize>,
    downloads: Pinned,
    /// Set by the first sticky error: the context is gone from then on.
    lost: Cell<bool>,
}

// SAFETY: driver handles belong to the process; every entry makes the context current on the calling thread first, and
// `&mut self` or the owner's exclusive use keeps calls apart.
unsafe impl Send for Device {}

/// Number of cards that the driver shows; 0 without a driver.
pub fn count() -> usize {
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } || result::init().is_err() {
        return 0;
    }
    result::device::get_count().map_or(0, |n| n.max(0) as usize)
}

/// Bytes of memory that are free on the `ordinal`-th card; `None` where it does not answer.
pub fn free_memory(ordinal: usize) -> Option<u64> {
    if ordinal >= count() {
        return None;
    }
    let dev = result::device::get(ordinal as i32).ok()?;
    // SAFETY: `dev` came from the driver; the primary context is released again, and nothing of it is kept.
    unsafe {
        let ctx = result::primary_ctx::retain(dev).ok()?;
        let free = result::ctx::set_current(ctx).and_then(|()| result::mem_get_info());
        let released = result::primary_ctx::release(dev);
        free.ok().zip(released.ok()).map(|((free, _), ())| free as u64)
    }
}

/// Whether the `ordinal`-th card can be used, without setting anything up on it.
pub fn probe(ordinal: usize) -> Result<()> {
    let found = count();
    if ordinal < found {
        return Ok(());
    }
    Err(BackendError::Failed {
        device: format!("cuda:{ordinal}"),
        what: "device".into(),
        reason: format!(
            "{found} NVIDIA cards are visible here (driver 580 or newer is needed); --cpu computes on the processor"
        ),
    })
}

impl Device {
    pub fn open(ordinal: usize) -> Result<Device> {
        let name = format!("cuda:{ordinal}");
        let failed = |what: &str, reason: String| BackendError::Failed {
            device: name.clone(),
            what: what.into(),
            reason,
        };
        probe(ordinal)?;
        let step = |what: &'static str| {
            let failed = &failed;
            move |e: DriverError| failed(what, e.to_string())
        };
        let dev = result::device::get(ordinal as i32).map_err(step("device"))?;
        let label = result::device::get_name(dev).map_err(step("device name"))?;
        use sys::CUdevice_attribute_enum as Attribute;
        // SAFETY: `dev` came from the driver.
        let attribute =
            |a| unsafe { result::device::get_attribute(dev, a) }.map_err(step("device attribute"));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
        let name = format!("cuda:{ordinal} ({label}, sm_{major}{minor})");
        let image = artefacts::image(major, minor).map_err(|reason| BackendError::Unsupported {
            device: name.clone(),
            what: "its architecture".into(),
            reason,
        })?;
        // SAFETY: `dev` is valid; the context lives as long as the process keeps a reference, which is never dropped
        // while memory of it is in use.
        unsafe {
            let ctx = result::primary_ctx::retain(dev).map_err(step("context"))?;
            result::ctx::set_current(ctx).map_err(step("context"))?;
            let stream =
                result::stream::create(result::stream::StreamKind::NonBlocking).map_err(step("stream"))?;
            let module = result::module::load_data(image.as_ptr().cast()).map_err(step("kernels"))?;
            let pinned = || Pinned::new(ctx).map_err(step("pinned memory"));
            let (uploads, downloads) = ([pinned()?, pinned()?], pinned()?);
            Ok(Device {
                name: name.clone(),
                ctx,
                stream,
                module,
                functions: HashMap::new(),
                overlaps: major >= 9 && std::env::var_os("NO_OVERLAP").is_none(),
                uploads,
                turn: Cell::new(0),
                downloads,
                lost: Cell::new(false),
            })
        }
    }

    /// An error of the driver as what it means here.
    fn error(&self, what: &str, e: DriverError) -> BackendError {
        use sys::cudaError_enum as Code;
        let device = self.name.clone();
        let what = what.to_string();
        match e.0 {
            Code::CUDA_ERROR_OUT_OF_MEMORY => {
                let available = result::mem_get_info().map_or(0, |(free, _)| free as u64);
                BackendError::OutOfMemory { device, what, needed: 0, available }
            }
            // After these the context answers nothing but the same error.
            Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
            | Code::CUDA_ERROR_UNKNOWN => {
                self.lost.set(true);
                BackendError::DeviceLost { device, what, reason: e.to_string() }
            }
            _ => BackendError::Failed { device, what, reason: e.to_string() },
        }
    }

    /// Makes the context current on this thread; refuses once the device is lost.
    pub fn enter(&self) -> Result<()> {
        if self.lost.get() {
            return Err(BackendError::DeviceLost {
                device: self.name.clone(),
                what: "an earlier step".into(),
                reason: "the context is unusable since".into(),
            });
        }
        // SAFETY: the context is retained for the process's lifetime.
        unsafe { result::ctx::set_current(self.ctx) }.map_err(|e| self.error("context", e))
    }

    pub fn allocate(&self, what: &str, bytes: u64) -> Result<Memory> {
        self.enter()?;
        // SAFETY: plain allocation; `Memory` frees it.
        let ptr = unsafe { result::malloc_sync(bytes.max(16) as usize) }.map_err(|e| {
            match self.error(what, e) {
                BackendError::OutOfMemory { device, what, available, .. } => {
                    BackendError::OutOfMemory { device, what, needed: bytes, available }
                }
                other => other,
            }
        })?;
        Ok(Memory { ptr, bytes, ctx: self.ctx })
    }

    pub fn synchronize(&self, what: &str) -> Result<()> {
        // SAFETY: our own stream.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|e| self.error(what, e))
    }

    pub fn zero(&self, at: Ptr, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: callers pass ranges of live allocations.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream) }.map_err(|e| self.error("memset", e))?;
        self.synchronize("memset")
    }

    /// Host to device through the pinned buffer; the source may be changed when this returns.
    pub fn upload(&self, what: &str, at: Ptr, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        let mut done = 0;
        for part in bytes.chunks(STAGING) {
            let buffer = &self.uploads[self.turn.get()];
            self.turn.set((self.turn.get() + 1) % TURNS);
            // SAFETY: the buffer's last copy has ended; `part` fits it; the range is of a live allocation.
            unsafe {
                result::event::synchronize(buffer.used).map_err(|e| self.error(what, e))?;
                copy_shared(part, std::slice::from_raw_parts_mut(buffer.ptr, part.len()));
                let staged = std::slice::from_raw_parts(buffer.ptr, part.len());
                result::memcpy_htod_async(at + done, staged, self.stream).map_err(|e| self.error(what, e))?;
                result::event::record(buffer.used, self.stream).map_err(|e| self.error(what, e))?;
            }
            done += part.len() as u64;
        }
        Ok(())
    }

    /// Device to host, after everything issued before.
    pub fn download(&self, what: &str, at: Ptr, out: &mut [u8]) -> Result<()> {
        self.enter()?;
        let mut done = 0;
        for part in out.chunks_mut(STAGING) {
            // SAFETY: as in `upload`; one buffer serves, since its copy is waited for here.
            unsafe {
                let staged = std::slice::from_raw_parts_mut(self.downloads.ptr, part.len());
                self.synchronize(what)?;
                result::memcpy_dtoh_async(staged, at + done, self.stream).map_err(|e| self.error(what, e))?;
                self.synchronize(what)?;
                part.copy_from_slice(staged);
            }
            done += part.len() as u64;
        }
        Ok(())
    }

    pub fn copy(&self, from: Ptr, to: Ptr, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: callers pass ranges of live allocations.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(|e| self.error("copy", e))
    }

    fn function(&mut self, name: &'static str) -> Result<sys::CUfunction> {
        if let Some(f) = self.functions.get(name) {
            return Ok(*f);
        }
        let symbol = CString::new(name).map_err(|e| BackendError::Failed {
            device: self.name.clone(),
            what: name.into(),
            reason: e.to_string(),
        })?;
        // SAFETY: the module stays loaded as long as the device.
        let f =
            unsafe { result::module::get_function(self.module, symbol) }.map_err(|e| self.error(name, e))?;
        self.functions.insert(name, f);
        Ok(f)
    }

    /// Lets `name` take up to `bytes` of dynamic shared memory.
    pub fn allow_shared(&mut self, name: &'static str, bytes: u32) -> Result<()> {
        let f = self.function(name)?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of our module.
        unsafe { result::function::set_function_attribute(f, attribute, bytes as i32) }
            .map_err(|e| self.error(name, e))
    }

    pub fn launch(
        &mut self,
        name: &'static str,
        grid: (u32, u32, u32),
        block: u32,
        shared: u32,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        let f = self.function(name)?;
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig_st {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream,
            attrs: &mut overlap,
            numAttrs: u32::from(self.overlaps),
        };
        // SAFETY: `launch!` builds the parameters from values of the kernel's own types; their pointers are of
        // allocations that live as long as the backend.
        unsafe { sys::cuLaunchKernelEx(&config, f, params.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|e| self.error(name, e))
    }

    pub fn begin_capture(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: our own stream.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(|e| self.error("graph", e))
    }

    pub fn end_capture(&self) -> Result<Graph> {
        // SAFETY: capture was begun on this stream; the graph is destroyed once instantiated.
        unsafe {
            let graph = result::stream::end_capture(self.stream).map_err(|e| self.error("graph", e))?;
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags_enum(0));
            let destroyed = result::graph::destroy(graph);
            let exec = exec.map_err(|e| self.error("graph", e))?;
            destroyed.map_err(|e| self.error("graph", e))?;
            Ok(Graph { exec, ctx: self.ctx })
        }
    }

    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: an executable graph of this context.
        unsafe { result::graph::launch(graph.exec, self.stream) }.map_err(|e| self.error("graph", e))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: our own stream and module; nothing uses them any more. A failure leaves nothing to do.
        unsafe {
            if result::ctx::set_current(self.ctx).is_ok() {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::module::unload(self.module);
                let _ = result::stream::destroy(self.stream);
            }
        }
    }
}

/// A recorded step.
pub struct Graph {
    exec: sys::CUgraphExec,
    ctx: sys::CUcontext,
}

// SAFETY: as for `Device`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated in this context, destroyed only here.
        unsafe {
            if result::ctx::set_current(self.ctx).is_ok() {
                let _ = result::graph::exec_destroy(self.exec);
            }
        }
    }
}

/// Address of a parameter for the driver, which copies it during the launch.
pub fn param<T: Param>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// `launch!(device, "kernel", grid, block, shared; a, b, c)`
macro_rules! launch {
    ($device:expr, $name:literal, $grid:expr, $block:expr, $shared:expr; $($arg:expr),* $(,)?) => {
        $device.launch($name, $grid, $block, $shared, &mut [$($crate::device::param(&$arg)),*])
    };
}
pub(crate) use launch;
