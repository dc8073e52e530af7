#include "sirtaki/check_parameters.h"

#include <torch/nn/module.h>

#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/equality.h"

namespace sirtaki {
namespace {

constexpr char kWhat[] = "check_parameters";

}  // namespace

void check_parameters(const torch::nn::Module& module, const ProcessSet& process_set) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) {
    names.push_back(item.key());
    tensors.push_back(item.value());
  }
  for (const auto& item : module.named_buffers()) {
    names.push_back("buffer " + item.key());
    tensors.push_back(item.value());
  }
  detail::CheckEqual(kWhat, names, tensors, detail::SetOf(process_set));
}

void check_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named_tensors,
                      const ProcessSet& process_set) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_tensors) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
  detail::CheckEqual(kWhat, names, tensors, detail::SetOf(process_set));
}

}  // namespace sirtaki
