//! Plain Rust, compiled for each level of instructions.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::float32x4_t;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

use crate::isa::Isa;
use crate::lanes::Vector;

/// What is compiled for each set of instructions.
pub(crate) trait InEachBuild {
    /// Inlined, so that it takes the instructions of its caller.
    fn run(self);
}

/// Runs it with these instructions, which the machine has.
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
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(work) },
            Isa::Neon | Isa::Portable => {}
        }
    }
    let _ = isa; // what the compiler makes of plain Rust has NEON wherever that is
    work.run();
}

/// What is compiled for the vectors of each set of instructions.
pub(crate) trait InVectors {
    /// Inlined, as [`InEachBuild::run`].
    fn run<V: Vector<L>, const L: usize>(self);
}

/// Runs it with these instructions, which the machine has.
pub(crate) fn best_vectors(isa: Isa, work: impl InVectors) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(work: impl InVectors) {
            work.run::<__m256, 8>();
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(work: impl InVectors) {
            work.run::<__m512, 16>();
        }
        #[allow(unsafe_code)]
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(work) },
            Isa::Neon | Isa::Portable => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        return work.run::<[float32x4_t; 2], 8>();
    }
    let _ = isa;
    work.run::<[f32; 8], 8>();
}

/// What is compiled for vectors of 16 lanes of each set of instructions, `N` of them at a time.
pub(crate) trait InLanes {
    /// Inlined, as [`InEachBuild::run`].
    fn run<V: Vector<16>, const N: usize>(self);
}

/// Runs it with these instructions, which the machine has.
pub(crate) fn best_lanes(isa: Isa, work: impl InLanes) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(work: impl InLanes) {
            work.run::<[__m256; 2], 2>();
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(work: impl InLanes) {
            work.run::<__m512, 4>();
        }
        #[allow(unsafe_code)]
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(work) },
            Isa::Neon | Isa::Portable => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        return work.run::<[[float32x4_t; 2]; 2], 2>();
    }
    let _ = isa;
    work.run::<[[f32; 8]; 2], 1>();
}
