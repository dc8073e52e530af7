# What can be chosen, and nothing else. AUTO takes what is found and never fails; ON fails with a reason.
include(GNUInstallDirs)

function(sirtaki_tristate name default help)
  set(${name} "${default}" CACHE STRING "${help} (AUTO, ON or OFF)")
  set_property(CACHE ${name} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${${name}}" value)
  if(NOT value MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${name} is '${${name}}'; allowed are AUTO, ON and OFF.")
  endif()
  set(${name} "${value}" PARENT_SCOPE)   # "off" means OFF
endfunction()

sirtaki_tristate(SIRTAKI_MPI AUTO "Communicate over MPI")
set(SIRTAKI_MPI_HEADERS "" CACHE STRING
  "Folders of mpi.h, and paths of mpi_abi.h, of other MPIs that the library is to know; an MPI of the found one's family needs none")
sirtaki_tristate(SIRTAKI_TORCH AUTO "Build the LibTorch interface and libsirtaki.so")
sirtaki_tristate(SIRTAKI_CUDA AUTO "Build the kernels for GPUs")
sirtaki_tristate(SIRTAKI_LAUNCH AUTO "Build sirtakirun")
sirtaki_tristate(SIRTAKI_PYTHON AUTO "Build the Python module")

option(SIRTAKI_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(SIRTAKI_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(SIRTAKI_BENCHMARKS "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(SIRTAKI_WERROR "Warnings are errors" OFF)
option(SIRTAKI_CCACHE "Compile through ccache where it is installed" ON)
option(SIRTAKI_PCH "Precompile LibTorch's headers" ON)
option(SIRTAKI_UNITY "Compile sources many at a time: fast once, slow after each change" ON)
option(SIRTAKI_STATIC_DEPENDENCIES "Put Boost, yaml-cpp, spdlog and fmt into the programs, for packages that go to machines without them" OFF)
option(SIRTAKI_CLANG_TIDY "Run clang-tidy on every source as it is compiled" OFF)
set(SIRTAKI_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them: 'address,undefined' or 'thread'")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
