//! Which instructions compute.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

#[cfg(target_arch = "x86_64")]
use crate::amx::Amx;
use crate::attention::{Job, Task};
#[cfg(target_arch = "x86_64")]
use crate::bf16::Bf16;
use crate::element::Element;
use crate::floats::Floats;
use crate::kernel::work;
#[cfg(target_arch = "x86_64")]
use crate::tiles;

/// Which build of the arithmetic runs. All but the last two give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the target has in any case.
    Portable,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with the parts of AVX-512 that servers have had since 2017.
    Avx512,
    /// The same with its products of bfloat16, where that is what is multiplied.
    Avx512Bf16,
    /// The same with AMX, for bfloat16.
    Amx,
}

impl Isa {
    /// The best that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let is_wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            return match is_wide {
                true if tiles::is_there() => Self::Amx,
                true if is_x86_feature_detected!("avx512bf16") => Self::Avx512Bf16,
                true => Self::Avx512,
                false => Self::Avx2,
            };
        }
        Self::Portable
    }

    /// Whether this machine has an instruction that multiplies and adds with one rounding. Without,
    /// the kernel is right, and slow.
    #[must_use]
    pub fn is_fast() -> bool {
        cfg!(target_feature = "fma")
            || cfg!(target_arch = "aarch64")
            || Self::detect() >= Self::Avx2
    }
}

/// [`work`] in floats with these instructions, or with the best that the machine has.
pub(crate) fn in_floats<E: Element>(isa: Isa, job: &Job<'_, E>, task: Task<'_, '_, E>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2<E: Element>(job: &Job<'_, E>, task: Task<'_, '_, E>) {
            work::<E, Floats<__m256, 8, 8>, 8>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512<E: Element>(job: &Job<'_, E>, task: Task<'_, '_, E>) {
            work::<E, Floats<__m512, 16, 16>, 16>(job, task);
        }
        #[allow(unsafe_code)]
        match isa.min(Isa::detect()) {
            // SAFETY: the machine has these instructions, as was looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(job, task) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(job, task) },
            Isa::Portable => {}
        }
    }
    let _ = isa;
    work::<E, Floats<[f32; 8], 8, 8>, 8>(job, task);
}

/// [`work`] in bfloat16 where the machine can, else in floats.
pub(crate) fn in_halves(isa: Isa, job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn bf16(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Bf16, 16>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn amx(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Amx, 16>(job, task);
        }
        #[allow(unsafe_code)]
        match isa.min(Isa::detect()) {
            // SAFETY: the machine has these instructions, as was looked up.
            Isa::Amx if Amx::takes(&job.shape) => return unsafe { amx(job, task) },
            // SAFETY: as above.
            Isa::Avx512Bf16 if Bf16::takes(&job.shape) => return unsafe { bf16(job, task) },
            _ => {}
        }
    }
    in_floats(isa, job, task);
}

/// What is compiled for each set of instructions.
pub(crate) trait InEachBuild {
    /// Inlined, so that it takes the instructions of its caller.
    fn run(self);
}

/// Runs it with these instructions, or with the best that the machine has.
pub(crate) fn best_build(isa: Isa, work: impl InEachBuild) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(work: impl InEachBuild) {
            work.run();
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(work: impl InEachBuild) {
            work.run();
        }
        #[allow(unsafe_code)]
        match isa.min(Isa::detect()) {
            // SAFETY: the machine has these instructions, as was looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(work) },
            Isa::Portable => {}
        }
    }
    let _ = isa;
    work.run();
}
