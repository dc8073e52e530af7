// say_once WHAT: a fault, and how the program learns of it.
//
//   caught      a call throws it; shutdown() follows
//   shutdown    nothing throws it; shutdown() follows
//   exit        nothing throws it, and the program just ends
//
// Prints what it has caught to standard output.
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  const std::string what = argc > 1 ? argv[1] : "";
  if (sirtaki::rank() == 0) sirtaki::abort("loss is not a number");
  if (what == "caught") {
    try {
      sirtaki::allreduce(torch::ones({1}));
    } catch (const sirtaki::Error& error) {
      std::printf("%s\n", (std::string("caught: ") + error.what()).c_str());
      std::fflush(stdout);
    }
  }
  if (what != "exit") sirtaki::shutdown();
  return 0;
}
