// An embedding with sparse gradients and what it is asked for, the same in every run.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "tests/torch/training.h"

namespace sirtaki::tests {

constexpr std::int64_t kTableRows = 9;
constexpr std::int64_t kTableColumns = 3;

inline torch::nn::Embedding MakeTable(bool sparse) {
  auto options = torch::nn::EmbeddingOptions(kTableRows, kTableColumns).sparse(sparse);
  torch::nn::Embedding table(options._weight(Waves({kTableRows, kTableColumns}, 1)));
  return table;
}

// Rows that ranks have in common, rows of one rank alone, the same row twice.
inline torch::Tensor RowsOfRank(int step, int rank) {
  const std::vector<std::int64_t> rows = {0, 1 + rank, 1 + rank, 4 + (step + rank) % 4};
  return torch::tensor(rows);
}

inline torch::Tensor TableLoss(torch::nn::Embedding& table, const torch::Tensor& rows, int rank) {
  return (table(rows) * Waves({rows.size(0), kTableColumns}, 10.0 * rank)).pow(2).sum();
}

// The mean over `size` ranks, in one process.
inline torch::Tensor JoinedTableLoss(torch::nn::Embedding& table, int step, int size) {
  auto sum = torch::zeros({}, torch::kDouble);
  for (int rank = 0; rank < size; ++rank) {
    sum = sum + TableLoss(table, RowsOfRank(step, rank), rank);
  }
  return sum / size;
}

}  // namespace sirtaki::tests
