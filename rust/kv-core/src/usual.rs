//! Tokens of a block of the usual size. The compiler knows how many they are, and calls nothing to copy
//! or compare them.

/// The usual block size.
pub(crate) const TOKENS: usize = 16;

type Usual = [u32; TOKENS];

#[inline]
pub(crate) fn are_equal(tokens: &[u32], others: &[u32]) -> bool {
    match (<&Usual>::try_from(tokens), <&Usual>::try_from(others)) {
        (Ok(tokens), Ok(others)) => {
            let pairs = tokens.iter().zip(others);
            pairs.fold(0, |differences, (one, other)| differences | (one ^ other)) == 0
        }
        _ => tokens == others,
    }
}

#[inline]
pub(crate) fn copy(tokens: &[u32], to: &mut [u32]) {
    match (<&Usual>::try_from(tokens), <&mut Usual>::try_from(&mut *to)) {
        (Ok(tokens), Ok(to)) => *to = *tokens,
        _ => to.copy_from_slice(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_counts() {
        for len in [1, TOKENS - 1, TOKENS, TOKENS + 1] {
            let tokens: Vec<u32> = (0..len as u32).map(|at| at << 27).collect();
            let mut others = vec![7; len];
            assert!(!are_equal(&tokens, &others));
            copy(&tokens, &mut others);
            assert_eq!(tokens, others);
            assert!(are_equal(&tokens, &others));
            for at in 0..len {
                others[at] ^= 1 << (at % 32);
                assert!(!are_equal(&tokens, &others), "{at} of {len}");
                others[at] = tokens[at];
            }
        }
        assert!(!are_equal(&[0; TOKENS], &[0; TOKENS + 1]));
    }
}
