//! The attention kernel for each element and level of instructions.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::float32x4_t;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

#[cfg(target_arch = "x86_64")]
use crate::amx::Amx;
#[cfg(target_arch = "x86_64")]
use crate::bf16::Bf16;
#[cfg(target_arch = "x86_64")]
use crate::bf16_dots;
#[cfg(target_arch = "x86_64")]
use crate::bf16_fma::Bf16Fma;
use crate::element::Element;
use crate::floats::Floats;
#[cfg(target_arch = "x86_64")]
use crate::int8::Int8;
use crate::isa::Isa;
use crate::job::{Job, Task};
use crate::kernel::work;
use crate::key_lanes::LANES;
use crate::linear_task::Multiply;
#[cfg(target_arch = "x86_64")]
use crate::stored::Cached;
use crate::stored::Stored;
#[cfg(target_arch = "x86_64")]
use crate::tile_product;

/// An element that attention and linear layers are compiled for: `f32`, and `u16` for the bits of bfloat16.
pub trait Attend: Element + Kernel + Stored<Self> {}

impl Attend for f32 {}
impl Attend for u16 {}

/// The kernel, compiled once for each element and in this crate: a caller's crate, which would compile a generic
/// function again, may be optimised otherwise.
#[allow(private_interfaces)] // sealed: no other crate can name this trait
pub trait Kernel: Sized {
    #[doc(hidden)]
    fn work(isa: Isa, job: &Job<'_, Self>, task: Task<'_, '_, Self>);

    #[doc(hidden)]
    fn multiply(isa: Isa, work: Multiply<'_, '_, Self>);
}

#[allow(private_interfaces)]
impl Kernel for f32 {
    fn work(isa: Isa, job: &Job<'_, f32>, task: Task<'_, '_, f32>) {
        match task.is_rest() {
            true => in_floats::<f32, true>(isa, job, task),
            false => in_floats::<f32, false>(isa, job, task),
        }
    }

    fn multiply(isa: Isa, work: Multiply<'_, '_, f32>) {
        work.run(isa);
    }
}

#[allow(private_interfaces)]
impl Kernel for u16 {
    fn work(isa: Isa, job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
        match task.is_rest() {
            true => in_halves::<true>(isa, job, task),
            false => in_halves::<false>(isa, job, task),
        }
    }

    fn multiply(isa: Isa, work: Multiply<'_, '_, u16>) {
        #[cfg(target_arch = "x86_64")]
        if let (Isa::Amx, Some(product)) = (isa, work.in_halves()) {
            return tile_product::multiply(work.columns, &product);
        }
        work.run(isa);
    }
}

/// [`work`] in floats with these instructions, which the machine has: an [`crate::Attention`] takes no others.
fn in_floats<E: Element, const IS_REST: bool>(isa: Isa, job: &Job<'_, E>, task: Task<'_, '_, E>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2<E: Element, const IS_REST: bool>(job: &Job<'_, E>, task: Task<'_, '_, E>) {
            work::<E, Floats<[__m256; 2], 6>, LANES, IS_REST>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512<E: Element, const IS_REST: bool>(job: &Job<'_, E>, task: Task<'_, '_, E>) {
            work::<E, Floats<__m512, 16>, LANES, IS_REST>(job, task);
        }
        #[allow(unsafe_code)]
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => {
                return unsafe { avx512::<E, IS_REST>(job, task) };
            }
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2::<E, IS_REST>(job, task) },
            Isa::Neon | Isa::Portable => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        return work::<E, Floats<[[float32x4_t; 2]; 2], 6>, LANES, IS_REST>(job, task);
    }
    let _ = isa; // slow without an instruction for products: compiled for one sum at a time
    work::<E, Floats<[[f32; 8]; 2], 1>, LANES, IS_REST>(job, task);
}

/// [`work`] in bfloat16 where these instructions can, else in floats.
fn in_halves<const IS_REST: bool>(isa: Isa, job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn bf16<const IS_REST: bool>(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Bf16, LANES, IS_REST>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn bf16_fma<const IS_REST: bool>(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Bf16Fma, LANES, IS_REST>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn amx<const IS_REST: bool>(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Amx, LANES, IS_REST>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn int8<const IS_REST: bool>(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Int8, LANES, IS_REST>(job, task);
        }
        #[allow(unsafe_code)]
        match (isa, &job.cached) {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            (Isa::Amx, Cached::Computed { .. }) if Amx::takes(&job.shape) => {
                return unsafe { amx::<IS_REST>(job, task) };
            }
            // SAFETY: as above.
            (Isa::Avx512Bf16, Cached::Computed { .. })
                if !bf16_dots::are_fast() && Bf16Fma::takes(&job.shape) =>
            {
                return unsafe { bf16_fma::<IS_REST>(job, task) };
            }
            // SAFETY: as above.
            (Isa::Avx512Bf16, Cached::Computed { .. }) if Bf16::takes(&job.shape) => {
                return unsafe { bf16::<IS_REST>(job, task) };
            }
            // SAFETY: as above, and `takes` looked up VNNI.
            (Isa::Amx | Isa::Avx512Bf16, Cached::Int8 { .. }) if Int8::takes(&job.shape) => {
                return unsafe { int8::<IS_REST>(job, task) };
            }
            _ => {}
        }
    }
    in_floats::<u16, IS_REST>(isa, job, task);
}
