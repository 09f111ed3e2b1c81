//! Products of bfloat16 with a packed weight by AVX-512's instruction for them (`VDPBF16PS`): two products a lane, in the
//! order of the inputs.
//!
//! AMD's processors begin one a cycle, which is twice the products of float32. Intel's begin one in two cycles, which is half
//! of them: there bfloat16 is widened and multiplied as float32.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::sync::LazyLock;

use crate::lines::Lines;
use crate::product::{Columns, Terms, add_products};

/// Whether the instruction is faster than two of float32, where it is there. Measured on Sapphire Rapids: 84 GFLOP/s a core,
/// and 165 in float32. A process uses one of both, so a row has the same bits in every batch.
pub(crate) fn are_fast() -> bool {
    static IS_INTEL: LazyLock<bool> = LazyLock::new(|| {
        let vendor = __cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes) == [*b"Genu", *b"ineI", *b"ntel"]
    });
    !*IS_INTEL
}

/// Adds to `columns.out` the products of its rows with the weight. Only for [`crate::Isa::Avx512Bf16`].
pub(crate) fn add_dots(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn add(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
        add_products::<Dots, __m512, 16>(columns, weight);
    }
    // SAFETY: the machine has these instructions, as `Attention` looked up.
    unsafe { add(columns, weight) };
}

/// bfloat16 with bfloat16. To be used only where the machine has the instruction: that is what makes the calls below
/// safe.
struct Dots;

impl Terms<__m512, 16> for Dots {
    type Element = u16;
    type Lane = u32;
    type Inputs = u32;
    type Weights = __m512i;
    const PER_LINE: usize = 2;
    const PARTS: usize = 1;

    #[inline(always)]
    fn inputs(elements: &[u16], _: usize) -> u32 {
        let second = elements.get(1).map_or(0, |&second| u32::from(second));
        u32::from(elements[0]) | second << 16
    }

    #[inline(always)]
    fn weights(line: &[u32; 16], _: usize) -> __m512i {
        // SAFETY: see above; 16 numbers are read.
        unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add(weights: __m512i, inputs: u32, sum: __m512) -> __m512 {
        // SAFETY: see above; vectors of these types have the same size.
        unsafe {
            let inputs = _mm512_set1_epi32(inputs.cast_signed());
            let [weights, inputs] =
                [weights, inputs].map(|bits| transmute::<__m512i, __m512bh>(bits));
            _mm512_dpbf16_ps(sum, weights, inputs)
        }
    }
}
