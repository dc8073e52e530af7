#include "ops/groups/row_counts.h"

namespace sirtaki::ops {

bool TotalBytes(const std::vector<std::int64_t>& rows, std::int64_t row_bytes,
                std::int64_t* total) {
  *total = 0;
  for (const std::int64_t r : rows) {
    std::int64_t bytes = 0;
    if (r < 0 || __builtin_mul_overflow(r, row_bytes, &bytes) ||
        __builtin_add_overflow(*total, bytes, total)) {
      return false;
    }
  }
  return true;
}

std::string WrongRows(const core::Key& key, const std::vector<std::int64_t>& rows) {
  std::string text = "the numbers of rows for " + key.ToString() + " are impossible:";
  for (std::size_t m = 0; m < rows.size(); ++m) {
    text +=
        (m == 0 ? " " : ", ") + std::to_string(rows[m]) + " rows of member " + std::to_string(m);
  }
  return text;
}

std::string NoMemoryFor(const core::Key& key) {
  return "out of memory for the result of " + key.ToString();
}

}  // namespace sirtaki::ops
