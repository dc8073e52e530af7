#include "sirtaki/check_parameters.h"

#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/equality.h"
#include "frameworks/torch/state/named_parameters.h"

namespace sirtaki {

void check_parameters(const torch::nn::Module& module, const ProcessSet& process_set) {
  check_parameters(detail::TensorsOf(module), process_set);
}

void check_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named_tensors,
                      const ProcessSet& process_set) {
  detail::CheckEqual("check_parameters", named_tensors, detail::SetOf(process_set));
}

}  // namespace sirtaki
