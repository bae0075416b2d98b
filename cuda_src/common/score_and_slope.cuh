// What a score is for gradients.
#pragma once

// A score, and its derivative by scale * product.
template <typename Real>
struct ScoreAndSlope {
  Real score, slope;
};
